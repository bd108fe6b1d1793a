"""The result of a run, and the lines that report it."""

import pathlib
import signal
from typing import Any, NamedTuple

from train.config import Config
from train.metrics import measures
from train.run.folder import CHECKPOINTS
from train.run.resuming import resume_command
from train.task.forward import TestResult


NONFINITE = "nonfinite"  # the reason to stop if no loss is finite any more


class Tested(NamedTuple):
    """Test results of the center and the best worker, and whether they are finite."""

    center: TestResult
    best: TestResult
    is_finite: bool = True

    def values(self) -> dict[str, Any]:
        """The values as in metrics.jsonl: `center_loss` and so on."""
        results = {"center": self.center, "best": self.best}.items()
        return {f"{of}_{key}": x for of, result in results for key, x in result.items()}


class Result(NamedTuple):
    """The result of a run.

    Attributes:
      folder: the run folder.
      step: steps taken.
      seconds: training time, without tests and checkpoints.
      tested: the tests after the last step; None if the run was stopped early.
      stopped_by: the signal that stopped it early, 'nonfinite', or None.
      saved: whether the last checkpoint was written.
      checkpoint: the step of the latest checkpoint, or None.
      finite_checkpoint: the step of the latest one with finite losses, or None.
      has_metrics: whether all metrics were written.
    """

    folder: pathlib.Path
    step: int
    seconds: float
    tested: Tested | None
    stopped_by: signal.Signals | str | None
    saved: bool
    checkpoint: int | None = None
    finite_checkpoint: int | None = None
    has_metrics: bool = True

    @property
    def diverged(self) -> bool:
        """Whether the last test found a loss that is not finite."""
        return self.tested is not None and not self.tested.is_finite

    @property
    def is_good(self) -> bool:
        """Whether training ended as intended and the last checkpoint was written."""
        return self.saved and self.stopped_by != NONFINITE and not self.diverged


def where(config: Config, folder: pathlib.Path, step: int) -> str:
    """Says where a run was when it failed, and how to resume it.

    Ray resumes the run of a process that it has started.
    """
    kept = f"at step {step}; checkpoints are kept in {folder / CHECKPOINTS}"
    if config.ray.processes is not None:
        return kept
    return f"{kept}; to resume: {resume_command(config, folder)}"


def last_line(result: Result, config: Config) -> str:
    """The last line that a run prints."""
    after = f"{result.seconds:.1f} s of training"
    if result.tested is not None:
        center, best = result.tested.center, result.tested.best
        line = (
            f"{measures.text(center, name=True)} (center), {measures.text(best)} "
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
    if result.stopped_by == NONFINITE:
        return (
            f"{line}: no worker had a finite loss for {config.stop_after_nonfinite} steps. "
            f"A smaller learning rate may help. The state is {state}; {_finite(result)}; "
            f"to resume anyway: {resume}"
        )
    return f"{line}, {state}; to resume: {resume}"


def _latest(result: Result) -> str:
    step = result.checkpoint
    return "there is none" if step is None else f"the latest one is of step {step}"


def _finite(result: Result) -> str:
    step = result.finite_checkpoint
    if step is None:
        return "no checkpoint has finite losses"
    return f"the latest checkpoint with finite losses is of step {step}"
