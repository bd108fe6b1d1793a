"""python -m train.interconnect: the command of `train.tools.interconnect`."""

import sys

from train.tools.interconnect import main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
