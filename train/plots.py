"""Draws the figures of a run as PNG files in its folder: python -m train.plots RUN."""

import pathlib
import sys

from train.metrics.log import METRICS
from train.process import command
from train.process.messages import plain
from train.run.folder import check_is_run
from train.run.plots import draw


def main(arguments: list[str]) -> int:
    """Draws the figures of the run folders named on the command line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m train.plots RUN [RUN ...]\n\nDraws the figures of runs.")
        return 0 if arguments else 2
    for argument in arguments:
        try:
            check_is_run(pathlib.Path(argument), METRICS)
            for path in draw(pathlib.Path(argument)):
                print(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"error: {plain(_reason(argument, error))}", file=sys.stderr)
            return 2
    return 0


def _reason(folder: str, error: Exception) -> str:
    """Why a run cannot be drawn."""
    match error:
        case OSError():
            return f"{folder} cannot be drawn: {error.strerror or error}"
        case KeyError() | TypeError():
            return f"{folder} cannot be drawn, its {METRICS} is damaged: {error!r}"
    return str(error)


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
