"""Testing the models while training, which leaves the training state alone."""

import jax
import numpy as np

from train.metrics import measures
from train.run.open import Run
from train.run.result import Tested


def run_test(run: Run) -> Tested:
    """Tests the center and the best worker, and writes what was found."""
    run.reporter.report(run.buffer.flush())
    run.buffer.read_losses(run.step)
    jax.block_until_ready(run.state)
    with run.stopwatch.paused():
        center = run.experiment.test_center(run.state)
        worker = run.buffer.recent.best
        best = run.experiment.test_worker(run.state, worker)
        sent = run.experiment.bytes_sent(run.state)
    trained = run.buffer.recent.average[worker]
    losses = [center["loss"], best["loss"], trained]
    tested = Tested(center, best, bool(np.isfinite(losses).all()))
    run.write("test", **tested.values(), best_worker=worker, bytes_sent=sent)
    run.progress.tested(measures.text(center, name=True))
    return tested
