"""python -m train.graphs: the command of `train.tools.graphs`."""

import sys

from train import command
from train.tools.graphs import main


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
