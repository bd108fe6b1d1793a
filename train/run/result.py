"""The result of a run, and the lines that report it."""

import math
import pathlib
import signal
from typing import Any, NamedTuple

from train.config.schema import Config
from train.metrics import measures
from train.process.messages import counted
from train.run.checkpoints import Best
from train.run.folder import CHECKPOINTS
from train.run.resuming import how_to_resume, is_gone
from train.task.forward import TestResult


NONFINITE = "nonfinite"  # the reason to stop if no loss is finite any more
ENDED = "ended"  # if too few workers live, or the others call this process lost
FAR = 0.2  # see `Result.is_far_above_best`


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
      seconds: training time, without compilation, tests and checkpoints.
      tested: the tests after the last step; None if the run was stopped early.
      stopped_by: the signal that stopped it early, 'nonfinite', 'ended', or None.
      saved: whether the last checkpoint was written.
      checkpoint: the step of the latest checkpoint, or None.
      finite_checkpoint: the step of the latest one with finite losses, or None.
      has_metrics: whether all metrics were written.
      best: the checkpoint with the best test, or None.
      guess: the first measure of a model that guesses uniformly.
      compile_seconds: time that compiling the step took, which is no training time.
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
    best: Best | None = None
    guess: float = math.inf
    compile_seconds: float = 0.0

    @property
    def is_nonfinite(self) -> bool:
        """Whether the last test found a loss that is not finite."""
        return self.tested is not None and not self.tested.is_finite

    @property
    def is_far_above_best(self) -> bool:
        r"""Whether the last test is much worse than the best checkpoint's.

        With the first measure of a test, m (the error, or the validation loss),

        .. math:: \min(m_\text{center}, m_\text{best worker}) - m_\text{best checkpoint} >
            m_\text{guess} / 5.

        The best worker counts, because methods exist whose center is no model to use.
        """
        if self.tested is None or self.best is None:
            return False
        last = min(map(measures.first, (self.tested.center, self.tested.best)))
        return last - self.best.value > FAR * self.guess

    @property
    def diverged(self) -> bool:
        """Whether a loss of the last test is not finite, or far above the best one."""
        return self.is_nonfinite or self.is_far_above_best

    @property
    def is_good(self) -> bool:
        """Whether training ended as intended and the last checkpoint was written."""
        return self.saved and self.stopped_by != NONFINITE and not self.diverged


def where(config: Config, folder: pathlib.Path, step: int) -> str:
    """Says where a run was when it failed, and how to resume it.

    Ray resumes the run of a process that it has started.
    """
    if is_gone(folder):
        return f"at step {step}; {how_to_resume(config, folder)}"
    kept = f"at step {step}; checkpoints are kept in {folder / CHECKPOINTS}"
    if config.ray.processes is not None:
        return kept
    return f"{kept}; {how_to_resume(config, folder)}"


def last_lines(result: Result, config: Config) -> str:
    """The last two lines that a run prints: its result, and what is kept of it where."""
    compiled = f"compiled in {result.compile_seconds:.1f} s"
    after = f"{result.seconds:.1f} s of training ({compiled})"
    if result.tested is None:
        return _of_stopped(result, config, after)
    center = result.tested.center
    best = result.tested.best
    line = (
        f"{measures.text(center, name=True)} (center), {measures.text(best)} "
        f"(best worker) after {counted(result.step, 'step')} and {after}"
    )
    kept = _best(result)
    if result.is_nonfinite:
        line += "; training has diverged: a loss is not finite"
        kept = [_finite(result), *kept]
    elif result.is_far_above_best:
        line += "; training has diverged: the last test is far above the best one"
    if not result.has_metrics:
        kept.append(f"NOT all metrics are in {result.folder}")
    if not result.saved:
        kept.append(f"the last checkpoint is NOT in {result.folder}, {_latest(result)}")
    if result.saved and result.has_metrics:
        kept.append(f"everything is in {result.folder}")
    return f"{line}\n{'; '.join(kept)}"


def _of_stopped(result: Result, config: Config, after: str) -> str:
    """The last two lines of a run that was stopped early, after this time."""
    state = "saved" if result.saved else f"NOT saved, {_latest(result)}"
    line = f"stopped at step {result.step} after {after}"
    kept = _best(result)
    if result.stopped_by == NONFINITE:
        steps = counted(config.stop_after_nonfinite, "step")
        line += (
            f": no worker had a finite loss for {steps}. A smaller learning rate may help. "
            f"The state is {state}"
        )
        kept = [_finite(result), *kept]
        again = how_to_resume(config, result.folder, "to resume anyway")
    else:
        line += f", {state}"
        again = how_to_resume(config, result.folder)
    return f"{line}\n{'; '.join([*kept, again])}"


def _latest(result: Result) -> str:
    step = result.checkpoint
    return "there is none" if step is None else f"the latest one is of step {step}"


def _best(result: Result) -> list[str]:
    """Names the best checkpoint and the last one, if any was tested."""
    if result.best is None:
        return []
    step, tested = result.best
    if step == result.checkpoint:
        return [f"best checkpoint: step {step} (the last one), {measures.text(tested)}"]
    best = f"best checkpoint: step {step}, {measures.text(tested)}"
    return [f"{best}; last checkpoint: step {result.checkpoint}"]


def _finite(result: Result) -> str:
    step = result.finite_checkpoint
    if step is None:
        return "no checkpoint has finite losses"
    return f"the latest checkpoint with finite losses is of step {step}"
