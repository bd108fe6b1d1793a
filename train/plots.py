"""python -m train.plots: the command of `train.metrics.plots`."""

import sys

from train import command
from train.metrics.plots import main


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
