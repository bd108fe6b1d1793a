"""Where an experiment's results go: a folder of its own."""

import pathlib
import time
from typing import Any

from matplotlib import pyplot as plt

from train.arguments import Parser
from train.plots import tidy
from train.run import folder as run_folder


def add_out(parser: Parser, name: str) -> None:
    """Adds the option --out, for `new_folder`."""
    default = f"runs/paper-{name}-DATE-TIME"
    parser.add_argument("--out", help=f"a new or empty folder (default: {default})")


def new_folder(out: str | None, name: str) -> pathlib.Path:
    """Makes the folder for the results of an experiment.

    Raises:
      ValueError: `out` is there and is not an empty folder.
    """
    if out is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = run_folder.unused(pathlib.Path("runs") / f"paper-{name}-{stamp}")
    else:
        folder = pathlib.Path(out)
        if run_folder.taken(folder):
            raise ValueError(f"`out` must be a new or empty folder, but {folder} exists")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(figure: Any, path: pathlib.Path) -> None:
    """Writes a figure, fit to print, and closes it."""
    tidy(figure).savefig(path, dpi=150)
    plt.close(figure)
