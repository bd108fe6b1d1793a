"""Saving a run in progress."""

import contextlib
import dataclasses
import math
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

import lsgd_jax as lj
from train.cluster.signals import StopRequested
from train.data.arrays import DataError
from train.metrics import measures
from train.run.open import Run
from train.run.reporting import report, run_test, write_leaders
from train.run.result import Tested


def save(run: Run, leaves_alone: bool = False) -> bool:
    """Begins to write a checkpoint of this step. Returns whether that succeeded so far.

    Measurements up to this step are written first, because a run that is resumed from the
    checkpoint would never write them.

    leaves_alone: whether other processes go on, which find no center at this step.
    """
    report(run, run.buffer.flush())
    write_leaders(run, run.buffer.take_elections())
    state = run.experiment.settled(run.state)
    jax.block_until_ready(state)
    with run.stopwatch.paused():
        if not leaves_alone:
            # A checkpoint needs no center.
            with contextlib.suppress(DataError, StopRequested, lj.LoopEnded):
                run.find_center(run.stop_signals.check_hurry)
        return run.checkpoints.save(run.step, state, notes(run), run.center)


def test_and_save(run: Run, since: int) -> None:
    """Saves and tests if their intervals have ended after step `since`.

    A test may take longer than there is time after SIGTERM, so the checkpoint is first.
    """
    run.test_is_due = run.passed(run.config.test_every, since)
    is_saved = run.passed(run.config.checkpoint_every, since)
    if is_saved:
        save(run)
    if run.test_is_due:
        test(run, saves_the_best=not is_saved)
    run.center = None


def test(run: Run, saves_the_best: bool) -> Tested | None:
    """Tests, and notes the result with the checkpoint of this step, if there is one.

    Args:
      run: the run.
      saves_the_best: whether to save if the test is better than those of all earlier steps.

    Returns:
      The result, or None if the run was asked to stop. Its resumption begins with the test.
      None in a process that does not test.
    """
    if not run.session.tests:
        with contextlib.suppress(DataError, StopRequested, lj.LoopEnded):
            run.find_center(run.stop_signals.check)
        run.test_is_due = False
        return None
    try:
        result = run_test(run)
    except (StopRequested, lj.LoopEnded):
        return None
    run.test_is_due = False
    tested = _tested(run)
    if tested is None:
        return result
    if measures.first(tested) < run.lowest:
        run.lowest = measures.first(tested)
        if saves_the_best:
            save(run)
    run.checkpoints.add_test(run.step, tested)
    return result


def notes(run: Run) -> dict[str, Any]:
    """The notes of a checkpoint: all that a run continues from besides its state."""
    losses = run.buffer.unreported_losses(run.step)
    recent = run.buffer.recent
    finite = run.experiment.workers.fetch(lj.is_finite(run.state.params))
    return {
        "seconds": run.stopwatch.seconds,
        "compile_seconds": run.stopwatch.compile_seconds,
        "recent_losses": _known(recent.average.tolist()),
        "nonfinite_steps": recent.nonfinite_steps,
        "losses": [None if row is None else _known(row) for row in losses],
        "workers": _grid(run),
        "finite": bool((finite & np.isfinite(recent.average)).any()),
        "best_worker": recent.best,
        "sizes": run.experiment.forward.sizes,
        "tested": _tested(run),
        "test_is_due": run.test_is_due,
    }


def _grid(run: Run) -> dict[str, Any]:
    """The grid of the workers in the state."""
    workers = run.experiment.workers
    grid = dataclasses.replace(
        run.config.workers, nodes=workers.nodes, locals=workers.locals
    )
    return dataclasses.asdict(grid)


def _tested(run: Run) -> dict[str, float] | None:
    """The result of the center if it was tested at this step and is finite."""
    if run.last_test is None:
        return None
    step, tested = run.last_test
    return tested.center if step == run.step and tested.is_finite else None


def _known(losses: list[float]) -> list[float | None]:
    """The losses with None, which JSON can represent, in place of nonfinite ones."""
    return [x if math.isfinite(x) else None for x in losses]


@contextlib.contextmanager
def saved_if_data_fail(run: Run) -> Generator[None]:
    """Saves the run if reading data fails inside the context."""
    try:
        yield
    except DataError:
        if not run.session.has_others:  # they would not take part
            save(run)
            run.checkpoints.close()
        raise
