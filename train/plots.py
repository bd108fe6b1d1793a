"""Draws the figures of a run as PNG files in its folder: python -m train.plots RUN."""

import pathlib
import sys

from train.process import command
from train.process.messages import plain


def main(arguments: list[str]) -> int:
    """Draws the figures of the run folders named on the command line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m train.plots RUN [RUN ...]\n\nDraws the figures of runs.")
        return 0 if arguments else 2
    # They import jax and matplotlib, which take seconds that --help can do without.
    from train.metrics.log import METRICS
    from train.run.folder import check_is_run
    from train.run.plots import draw

    for argument in arguments:
        try:
            check_is_run(pathlib.Path(argument), METRICS)
            for path in draw(pathlib.Path(argument)):
                print(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = _reason(argument, METRICS, error)
            print(f"error: {plain(reason)}", file=sys.stderr)
            return 2
    return 0


def _reason(folder: str, file: str, error: Exception) -> str:
    """Why a run cannot be drawn, whose metrics are in a file."""
    match error:
        case OSError():
            return f"{folder} cannot be drawn: {error.strerror or error}"
        case KeyError() | TypeError():
            return f"{folder} cannot be drawn, its {file} is damaged: {error!r}"
    return str(error)


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
