"""AD-PSGD: pairs average at any delay and conserve the sum over all workers."""

import jax
import numpy as np
import pytest
import toys

from lsgd_jax.asynchronous import ADPSGD


@pytest.mark.parametrize("workers, latency", [(2, 1e-4), (4, 0.3), (5, 1e-4), (5, 2.0)])
def test_the_sum_is_conserved_and_workers_converge(monkeypatch, workers, latency):
    monkeypatch.setattr("zlib.crc32", lambda data: 0)  # so that they may start apart
    seconds = [1, 0.7, 2.3, 1, 5][:workers]
    ended = toys.simulate(toys.resting(), ADPSGD(), 1, workers, 40, seconds, latency)
    found = toys.stacked(ended)
    np.testing.assert_allclose(found[:, -1].mean(), np.mean(range(workers)), rtol=1e-6)
    assert np.ptp(found, axis=0).max() < 0.2 * workers


def test_workers_move_half_the_way_and_keep_steps_taken_meanwhile():
    """By hand: two workers, a gradient of 1 per step, the answer two steps late."""
    task = toys.moving(toys.start(), lambda x, i: jax.tree.map(lambda x: x * 0 - 1, x))
    ended = toys.simulate(task, ADPSGD(), 1, 2, 4, [1, 1.1], latency=0.75)
    assert sum(map(toys.position, ended)) == -8
    assert ended[0].report.staleness == 2
