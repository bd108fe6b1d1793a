"""How a run ended, and the lines that say so."""

import pathlib
import signal
from typing import NamedTuple

from train.config import Config
from train.run.folder import CHECKPOINTS
from train.run.resuming import resume_command


class Result(NamedTuple):
    """How a run ended.

    Attributes:
      folder: its run folder.
      step: steps taken.
      seconds: training time, without tests and checkpoints.
      center_error, best_error: test errors in %; nan if the run was stopped early.
      stopped_by: the signal that stopped it early, 'nonfinite', or None.
      saved: whether the last checkpoint has arrived.
      leaving: the processes that leave while the others go on; none if the run has ended.
    """

    folder: pathlib.Path
    step: int
    seconds: float
    center_error: float
    best_error: float
    stopped_by: signal.Signals | str | None
    saved: bool
    leaving: list[int]


def where(config: Config, folder: pathlib.Path, step: int) -> str:
    """Where a run is and how to go on with it, if it cannot go on by itself."""
    return (
        f"at step {step}; checkpoints are kept in {folder / CHECKPOINTS}; to go on: "
        f"{resume_command(config, folder)}"
    )


def last_line(result: Result, config: Config) -> str:
    """How the run ended, in a line."""
    seconds = f"{result.seconds:.1f} s of training"
    if result.stopped_by is None:
        return (
            f"test error {result.center_error:.2f} % (center), {result.best_error:.2f} % "
            f"(best worker) after {result.step} steps and {seconds}; everything is in "
            f"{result.folder}"
        )
    resume = resume_command(config, result.folder)
    if result.stopped_by == "nonfinite":
        return (
            f"stopped at step {result.step} after {seconds}: no worker had a finite loss "
            f"for {config.stop_after_nonfinite} steps. A smaller learning rate may help. "
            f"The state is saved; to go on all the same: {resume}"
        )
    state = "saved" if result.saved else "NOT saved, an earlier checkpoint may be there"
    return f"stopped at step {result.step} after {seconds}, {state}; to go on: {resume}"
