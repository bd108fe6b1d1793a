"""python -m train.plots: the command of `train.metrics.plots`."""

import sys

from train.metrics.plots import main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
