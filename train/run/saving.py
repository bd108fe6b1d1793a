"""Saving a run while it is trained."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from train.data.arrays import DataError
from train.run.open import Run


def save(run: Run) -> bool:
    """Begins to write a checkpoint of this step; whether that went well so far."""
    if run.step == run.saved_at:
        return True
    run.saved_at = run.step
    run.session.work.begin(f"saving step {run.step}")
    with run.stopwatch.paused():
        recent = run.reporter.recent_losses.tolist()
        notes = {
            "seconds": run.stopwatch.seconds,
            "recent_losses": [x if np.isfinite(x) else None for x in recent],
            "workers": dataclasses.asdict(run.config.workers),
        }
        return run.checkpoints.save(run.step, run.state, notes)


@contextlib.contextmanager
def saved_if_data_fail(run: Run) -> Iterator[None]:
    """Saves the state if no data can be read any more."""
    try:
        yield
    except DataError:
        if not run.session.has_others:  # they would not take part
            save(run)
            run.checkpoints.close()
        raise
