"""Testing the models while training, which leaves the training state alone."""

from typing import NamedTuple

import jax
import numpy as np

import lsgd_jax as lj
from train.run.open import Run
from train.run.reporting import bytes_sent


class Tested(NamedTuple):
    """Test errors of the center and of the best worker, in %; whether losses are finite."""

    center_error: float
    best_error: float
    is_finite: bool


def run_test(run: Run) -> Tested:
    """Tests the center and the best worker, and writes what was found."""
    run.reporter.report(run.buffer.flush())
    run.buffer.read_losses(run.step)
    jax.block_until_ready(run.state)
    with run.stopwatch.paused():
        center = run.experiment.test_center(run.state)
        worker = run.buffer.recent.best
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
    trained = run.buffer.recent.average[worker]
    is_finite = bool(np.isfinite([center.loss, best.loss, trained]).all())
    return Tested(center.error, best.error, is_finite)
