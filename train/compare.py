"""python -m train.compare: the command of `train.tools.compare`."""

import sys

from train import command
from train.tools.compare import main


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
