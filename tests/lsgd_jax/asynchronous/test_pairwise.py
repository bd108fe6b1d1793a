"""Pairwise averaging with snapshots of random peers."""

import numpy as np
import pytest
import toys

from lsgd_jax._src.asynchronous import memory
from lsgd_jax.asynchronous import Pairwise


@pytest.fixture
def apart(monkeypatch):
    """Workers that start where the task says, wherever that is."""
    monkeypatch.setattr("zlib.crc32", lambda data: 0)


def moved(method, steps=1):
    """Where two workers from 0 and 1 with losses 1 and 2 are after so many steps."""
    found = {}

    def note(worker):
        if worker.count == steps:
            found[worker.index] = toys.positions([worker])[0]

    memory.run(toys.resting(), method, 1, 2, steps=steps + 3, observe=note)
    return [found[0], found[1]]


def test_how_much_is_taken_follows_the_kind_of_interpolation(apart):
    # By hand. The first finds the second where it has started, and is found moved.
    assert moved(Pairwise(value=0.25)) == [0.25, 1 - 0.25 * 0.75]
    assert moved(Pairwise("clock")) == [0, 0.5]  # clocks 1 and 0: f = 0; 1 and 1: f = 1/2
    # The first knows no loss of the second yet; the second has 2, and the first 1.
    assert moved(Pairwise("loss")) == pytest.approx([0, 1 / 3])
    assert moved(Pairwise(fetch_probability=0.0)) == [0, 1]


def test_clocks_are_mixed_with_the_same_weight(apart):
    workers = memory.run(
        toys.resting(), Pairwise("clock"), 1, 2, steps=8, step_seconds=[1, 3]
    )
    clocks = [worker.running.state()["clock"] for worker in workers]
    # The slow one takes the more from the fast one, and then counts as nearly as far.
    assert clocks[1] > workers[1].count and workers[0].count > 2 * workers[1].count


def test_below_the_threshold_less_is_taken(apart):
    plain = moved(Pairwise("loss"), steps=3)
    careful = moved(Pairwise("loss", divergence_threshold=10.0), steps=3)
    assert 0 < careful[0] < plain[0] and plain[1] < careful[1] < 1


def test_a_slow_one_and_a_slow_answer_hold_no_worker_up():
    workers = memory.run(
        toys.training(),
        Pairwise(),
        2,
        2,
        steps=30,
        step_seconds=[1, 1, 1, 10],
        latency=2.5,
    )
    counts = [worker.count for worker in workers]
    assert sum(counts) == 120 and min(counts[:3]) >= 9 * (counts[3] - 1)
    assert [worker.report.waited for worker in workers] == [0] * 4
    assert workers[0].report.staleness == 3 and workers[1].report.bytes_sent > 0


def test_one_that_does_not_answer_is_asked_less_often_and_comes_back():
    asked = []

    def fail(memory, worker):
        if worker.index == 1:
            return
        asked.append(1 in memory.lost and worker.running._coming is not None)
        if worker.count == 3:
            memory.hung.add(1), memory.lost.add(1)
        if worker.count == 60:
            memory.lost.clear(), memory.hung.clear()

    workers = memory.run(
        toys.training(),
        Pairwise(),
        1,
        2,
        steps=60,
        events=fail,
        grace=1.5,
        latency=0.1,
    )
    assert 0 < sum(asked[10:60]) < 25
    assert np.isfinite(toys.stacked(workers)).all()
    assert workers[0].report.staleness >= 1 and workers[1].count > 10


def test_one_that_is_not_finite_takes_its_peer_whole():
    for interpolation in ("constant", "loss", "clock"):
        task = toys.broken(toys.training(), 1, steps=[3])
        workers = memory.run(task, Pairwise(interpolation), 1, 3, steps=9)
        assert np.isfinite(toys.stacked(workers)).all()


def test_alone_it_is_the_base_optimizer():
    workers = memory.run(toys.training(), Pairwise(), 1, 1, steps=5)
    off = memory.run(toys.training(), Pairwise(fetch_probability=0.0), 1, 1, steps=5)
    np.testing.assert_array_equal(toys.stacked(workers), toys.stacked(off))


@pytest.mark.parametrize(
    "given",
    [{"interpolation": "none"}, {"value": 1.5}, {"fetch_probability": -1}, {"window": 0}],
)
def test_what_it_refuses(given):
    with pytest.raises(ValueError, match=f"`{next(iter(given))}` must be"):
        Pairwise(**given)
