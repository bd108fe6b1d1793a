"""python -m train.launch: the command of `train.tools.launch`."""

import sys

from train.tools.launch import main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
