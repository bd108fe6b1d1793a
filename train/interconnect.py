"""python -m train.interconnect: the command of `train.tools.interconnect`."""

import sys

from train import command
from train.tools.interconnect import main


if __name__ == "__main__":
    sys.exit(command.run(main))
