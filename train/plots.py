"""Draws the figures of a run as PNG files in its folder: python -m train.plots RUN."""

import pathlib
import sys

from train.process import command
from train.run.plots import draw


def main(arguments: list[str]) -> int:
    """Draws the figures of the run folders named on the command line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m train.plots RUN [RUN ...]\n\nDraws the figures of runs.")
        return 0 if arguments else 2
    for argument in arguments:
        try:
            for path in draw(pathlib.Path(argument)):
                print(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"error: {argument} cannot be drawn: {error!r}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
