"""python -m train.simulate: the command of `train.tools.simulate`."""

import sys

from train import command
from train.tools.simulate import main


if __name__ == "__main__":
    sys.exit(command.run(main))
