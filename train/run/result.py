"""How a run ended, and the lines that say so."""

import pathlib
import signal
from typing import NamedTuple

from train.config import Config
from train.run.folder import CHECKPOINTS


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
      diverged: whether the last test found a loss that is not finite.
      checkpoint: the step of the latest checkpoint, or None.
      finite_checkpoint: the step of the latest one with finite losses, or None.
      has_metrics: whether all metrics could be written.
    """

    folder: pathlib.Path
    step: int
    seconds: float
    center_error: float
    best_error: float
    stopped_by: signal.Signals | str | None
    saved: bool
    leaving: list[int]
    diverged: bool = False
    checkpoint: int | None = None
    finite_checkpoint: int | None = None
    has_metrics: bool = True

    @property
    def is_good(self) -> bool:
        """Whether training came to what it was meant to, and all of it is saved."""
        return self.saved and self.stopped_by != "nonfinite" and not self.diverged


def resume_command(config: Config, folder: pathlib.Path) -> str:
    """The command that goes on with a run."""
    return f"python -m train {config.name} --run-dir {folder} --resume"


def where(config: Config, folder: pathlib.Path, step: int) -> str:
    """Where a run is and how to go on with it, if it cannot go on by itself."""
    return (
        f"at step {step}; checkpoints are kept in {folder / CHECKPOINTS}; to go on: "
        f"{resume_command(config, folder)}"
    )


def last_line(result: Result, config: Config) -> str:
    """How the run ended, in a line."""
    after = f"{result.seconds:.1f} s of training"
    if result.stopped_by is None:
        line = (
            f"test error {result.center_error:.2f} % (center), {result.best_error:.2f} % "
            f"(best worker) after {result.step} steps and {after}"
        )
        if result.diverged:
            line += f"; training has diverged: a loss is not finite; {_finite(result)}"
        if not result.has_metrics:
            line += f"; NOT all metrics are in {result.folder}"
        if not result.saved:
            line += f"; the last checkpoint is NOT in {result.folder}, {_latest(result)}"
        is_whole = result.saved and result.has_metrics
        return f"{line}; everything is in {result.folder}" if is_whole else line
    state = "saved" if result.saved else f"NOT saved, {_latest(result)}"
    line = f"stopped at step {result.step} after {after}"
    resume = resume_command(config, result.folder)
    if result.stopped_by == "nonfinite":
        return (
            f"{line}: no worker had a finite loss for {config.stop_after_nonfinite} steps. "
            f"A smaller learning rate may help. The state is {state}; {_finite(result)}; "
            f"to go on all the same: {resume}"
        )
    return f"{line}, {state}; to go on: {resume}"


def _latest(result: Result) -> str:
    step = result.checkpoint
    return "there is none" if step is None else f"the latest one is of step {step}"


def _finite(result: Result) -> str:
    step = result.finite_checkpoint
    if step is None:
        return "no checkpoint has finite losses"
    return f"the latest checkpoint with finite losses is of step {step}"
