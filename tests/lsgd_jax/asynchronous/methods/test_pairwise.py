"""Asynchronous pairwise averaging: the weight of a random peer's snapshot."""

import pytest
import toys

from lsgd_jax.asynchronous import Pairwise


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Lets workers start from different parameters."""
    monkeypatch.setattr("zlib.crc32", lambda data: 0)


def moved(method, steps=1):
    """Positions of two workers, from 0 and 1 with losses 1 and 2, after some steps."""
    note, seen = toys.noting(toys.position)
    toys.simulate(toys.resting(), method, 1, 2, steps + 3, [1, 1.1], observe=note)
    return [seen[i][steps - 1] for i in range(2)]


def test_the_weight_follows_the_interpolation():
    # By hand. Both are fetched where they have started.
    assert moved(Pairwise(value=0.25)) == [0.25, 0.75]
    assert moved(Pairwise("clock")) == [0, 1]  # clocks 1 and 0: f = 0
    assert moved(Pairwise("clock"), 2)[1] == pytest.approx(1 - 1 / 3)  # clocks 2 and 1
    assert moved(Pairwise("loss")) == [0, 1]  # no loss of the peer is known yet
    assert moved(Pairwise("loss"), 2)[1] == pytest.approx(1 - 2 / 3)  # losses 2 and 1
    assert moved(Pairwise("loss"), 3)[0] == pytest.approx(1 / 3)  # losses 1 and 2
    assert moved(Pairwise(fetch_probability=0.0)) == [0, 1]


def test_clocks_are_mixed_with_the_same_weight():
    workers = toys.simulate(toys.resting(), Pairwise("clock"), 1, 2, 8, [1, 3.1])
    clocks = [worker.method.state()["clock"] for worker in workers]
    # The slow one takes the more from the fast one, and then counts as nearly as far.
    assert clocks[1] > workers[1].count and workers[0].count > 2 * workers[1].count


def test_below_the_threshold_the_weight_is_smaller():
    careful = Pairwise("loss", divergence_threshold=10.0)
    # By hand: f as above, scaled by own loss / threshold = 2 / 10, or 1 / 10.
    assert moved(careful, 2)[1] == pytest.approx(1 - 2 / 3 * 2 / 10)
    assert moved(careful, 3)[0] == pytest.approx(1 / 3 * 1 / 10)


def test_staleness_is_the_age_of_the_snapshot():
    workers = toys.simulate(toys.training(), Pairwise(), 1, 2, 30, [1, 1.1], latency=0.45)
    assert workers[0].report.staleness == 1 and workers[1].report.bytes_sent > 0
