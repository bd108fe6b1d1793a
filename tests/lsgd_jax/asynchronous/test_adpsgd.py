"""AD-PSGD: pairs average at any delay, and the sum over all workers stays."""

import jax
import numpy as np
import pytest
import toys

from lsgd_jax._src.asynchronous import memory
from lsgd_jax.asynchronous import ADPSGD


@pytest.fixture
def apart(monkeypatch):
    """Workers that start where the task says, wherever that is."""
    monkeypatch.setattr("zlib.crc32", lambda data: 0)


@pytest.mark.parametrize("workers, latency", [(2, 0.0), (4, 0.3), (5, 0.0), (5, 4.0)])
def test_the_sum_is_kept_and_all_come_together(apart, workers, latency):
    ended = memory.run(
        toys.resting(),
        ADPSGD(),
        1,
        workers,
        steps=40,
        latency=latency,
        step_seconds=[1, 0.7, 2.3, 1, 5][:workers],
    )
    found = toys.stacked(ended)
    expected = np.mean([toys.start()["b"][0] + i for i in range(workers)])
    np.testing.assert_allclose(found[:, -1].mean(), expected - 1, rtol=1e-6)
    assert np.ptp(found, axis=0).max() < 0.2 * workers


def test_workers_move_half_the_way_and_keep_what_they_did_meanwhile():
    """By hand: two workers, a gradient of 1 per step, the answer two steps late."""
    task = toys.resting(apart=0.0)
    push = lambda x, s, i, t: (jax.tree.map(lambda x: x * 0 - 1, x), s, i, 1.0)
    ended = memory.run(
        task._replace(step=push),
        ADPSGD(),
        1,
        2,
        steps=4,
        latency=1.5,
    )
    assert sum(toys.positions(ended)) == -8
    assert ended[0].report.staleness == 2


def test_a_slow_or_lost_passive_worker_holds_no_active_one_up():
    def lose(memory, worker):
        if worker.index == 1 and worker.count == 3:
            memory.lose(1)

    ended = memory.run(
        toys.training(),
        ADPSGD(),
        1,
        4,
        steps=30,
        events=lose,
        latency=0.1,
        grace=2,
        step_seconds=[1, 1, 1, 10],
    )
    assert min(ended[0].count, ended[2].count) > 40
    assert max(worker.report.longest for worker in ended) <= 2
    assert all(worker.report.bytes_sent > 0 for worker in ended[:1] + ended[2:])


@pytest.mark.parametrize("sick", [0, 1])
def test_one_that_is_not_finite_is_mixed_with_no_other_and_takes_one_whole(sick):
    task = toys.broken(toys.training(), sick, steps=[4])
    ended = memory.run(task, ADPSGD(), 1, 4, steps=12, latency=0.2)
    assert np.isfinite(toys.stacked(ended)).all()


def test_one_that_starts_again_leaves_behind_what_was_meant_for_what_it_was():
    lost = []

    def lose(memory, worker):
        if worker.index == 1 and worker.count == 5 and not lost:
            lost.append(worker)
            memory.lose(1)

    ended = memory.run(
        toys.training(),
        ADPSGD(),
        1,
        3,
        steps=20,
        events=lose,
        restarts=True,
        grace=2,
    )
    assert ended[1] is not lost[0] and np.isfinite(toys.stacked(ended)).all()


def test_alone_it_is_the_base_optimizer():
    one = memory.run(toys.training(), ADPSGD(), 1, 1, steps=5)[0]
    assert one.count == 5 and one.report.bytes_sent == 0
    with pytest.raises(ValueError, match="`window` must be"):
        ADPSGD(window=0)
