"""Testing the models while training, which leaves the training state alone."""

from typing import NamedTuple

import jax
import numpy as np

import lsgd_jax as lj
from train.run.open import Run
from train.run.reporting import bytes_sent


class Errors(NamedTuple):
    """Test errors of the center and of the best worker, in %."""

    center: float
    best: float


def run_test(run: Run) -> Errors:
    """Tests the center and the best worker, and writes what was found."""
    run.session.work.begin(f"testing after step {run.step}")
    run.reporter.report(run.buffer.flush())
    jax.block_until_ready(run.state)
    with run.stopwatch.paused():
        center = run.experiment.test_center(run.state)
        worker = int(np.argmin(run.reporter.recent_losses))
        best = run.experiment.test_worker(run.state, worker)
        diagnostics = run.experiment.workers.fetch(lj.diagnostics(run.state.opt_state))
    run.write(
        "test",
        center_error=center.error,
        center_loss=center.loss,
        best_error=best.error,
        best_loss=best.loss,
        best_worker=worker,
        bytes_sent=bytes_sent(diagnostics),
    )
    run.progress.tested(center.error)
    return Errors(center.error, best.error)
