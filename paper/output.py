"""Where an experiment's results go: a folder of its own."""

import dataclasses
import pathlib
import time
from typing import Any, NamedTuple

from matplotlib import pyplot as plt

import lsgd_jax as lj
from train.metrics import tables
from train.plots import tidy
from train.run import folder as run_folder


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that all exact experiments have."""

    # Seed of all that is random.
    seed: int = 0
    # A new or empty folder; by default runs/paper-NAME-DATE-TIME.
    out: pathlib.Path | None = None

    def __post_init__(self):
        lj.checks.check_not_negative("seed", self.seed)


class Results(NamedTuple):
    """What an experiment found.

    Attributes:
      summary: text for the screen.
      tables: rows by the name of their CSV file.
      texts: Markdown by the name of its file.
      figures: matplotlib figures by the name of their PNG file.
      holds: whether all is as it was claimed.
    """

    summary: str
    tables: dict[str, list[dict[str, Any]]]
    texts: dict[str, str]
    figures: dict[str, Any]
    holds: bool = True

    def write(self, out: pathlib.Path) -> None:
        """Writes all files into a folder."""
        for name, rows in self.tables.items():
            tables.write_csv(rows, out / f"{name}.csv")
        for name, text in self.texts.items():
            (out / f"{name}.md").write_text(text, encoding="utf-8")
        for name, figure in self.figures.items():
            tidy(figure).savefig(out / f"{name}.png", dpi=150)
            plt.close(figure)


def new_folder(out: pathlib.Path | None, name: str) -> pathlib.Path:
    """Makes the folder for the results of an experiment.

    Raises:
      ValueError: `out` is there and is not an empty folder.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = out or run_folder.unused(pathlib.Path("runs") / f"paper-{name}-{stamp}")
    if run_folder.taken(folder):
        raise ValueError(f"`out` must be a new or empty folder, but {folder} exists")
    make(folder)
    return folder


def make(folder: pathlib.Path) -> None:
    """Makes a folder if need be; raises ValueError if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot take the results: {error}") from error
