"""The results of an experiment, and the folder that they are written to."""

import dataclasses
import pathlib
import time
from typing import Any, NamedTuple

from matplotlib import pyplot as plt

from train.config.schema import SEED
from train.metrics import tables
from train.metrics.drawing import tidy
from train.run import folder as run_folder


@dataclasses.dataclass(frozen=True)
class ExperimentOptions:
    """The options that all exact experiments share."""

    # Seed of all random numbers.
    seed: int = 0
    # A new or empty folder. Defaults to runs/paper-NAME-DATE-TIME.
    out: pathlib.Path | None = None

    def __post_init__(self):
        if not SEED.holds(self.seed):
            raise ValueError(f"`seed` must be {SEED.text}, got seed={self.seed}")


class Results(NamedTuple):
    """The results of an experiment.

    Attributes:
      summary: text for the screen.
      tables: rows by the name of their CSV file.
      texts: Markdown by the name of its file.
      figures: matplotlib figures by the name of their PNG file.
      holds: whether everything that was claimed holds.
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
      ValueError: `out` exists and is not an empty folder.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = out or run_folder.unused(pathlib.Path("runs") / f"paper-{name}-{stamp}")
    if run_folder.taken(folder):
        raise ValueError(f"`out` must be a new or empty folder, but {folder} exists")
    make(folder)
    return folder


def make(folder: pathlib.Path) -> None:
    """Makes a folder unless it exists; raises ValueError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the results cannot be written to {folder}: {error}") from error
