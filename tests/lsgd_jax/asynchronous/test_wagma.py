"""WAGMA: groups that whoever comes first makes, and the mean of all now and then."""

import jax.numpy as jnp
import numpy as np
import pytest
import toys

from lsgd_jax._src.asynchronous import memory
from lsgd_jax.asynchronous import WAGMA


NEVER = 1000


@pytest.fixture
def apart(monkeypatch):
    """Workers that start where the task says, wherever that is."""
    monkeypatch.setattr("zlib.crc32", lambda data: 0)


def up(task):
    """The same, but every step adds 8."""
    up = lambda x, s, i, t: ({k: jnp.full_like(v, 8.0) for k, v in x.items()}, s, i, 1.0)
    return task._replace(step=up)


def after(steps, method, workers, **options):
    """Where all are after so many steps of their own."""
    found = {}

    def note(worker):
        if worker.count == steps:
            found[worker.index] = toys.positions([worker])[0]

    memory.run(up(toys.resting()), method, 1, workers, 6, observe=note, **options)
    return [found[i] for i in sorted(found)]


def test_the_first_one_makes_the_mean_and_the_late_one_adds_its_own(apart):
    """By hand: 0 and 1 start at 0 and 1, a step adds 8, and 0 comes first."""
    first, late = after(1, WAGMA(2, NEVER), 2, step_seconds=[1, 1.5])
    assert first == (8 + 1) / 2  # 1 contributes where it has started
    assert late == (8 + 1 + 9) / 3  # the same sum, and its own


def test_the_groups_change_along_the_butterfly(apart):
    seconds = [1, 1.1, 1.2, 1.3]
    one = after(1, WAGMA(2, NEVER), 4, step_seconds=seconds)
    assert one[0] == (8 + 1) / 2 and one[2] == (10 + 3) / 2  # pairs (0, 1) and (2, 3)
    two = after(2, WAGMA(2, NEVER), 4, step_seconds=seconds)
    assert two[0] == (one[0] + 8 + one[2]) / 2  # then (0, 2)
    all_of_them = after(1, WAGMA(4, NEVER), 4, step_seconds=seconds)
    assert all_of_them[0] == (8 + 1 + 2 + 3) / 4


def test_all_take_the_same_parts_and_the_mean_of_all_makes_them_equal():
    together = []

    def note(memory, worker):
        if worker.index == 0:
            together.append(memory.coordinator.number)

    found = memory.run(
        toys.training(),
        WAGMA(2, sync_period=5),
        2,
        2,
        steps=10,
        events=note,
        step_seconds=[1, 1, 1, 3],
        latency=0.05,
    )
    assert sum(worker.count for worker in found) == 40 and together[-1] == 1
    assert found[0].count > 2 * found[3].count
    # It ends with the second mean of all.
    assert np.ptp(toys.stacked(found), axis=0).max() == 0


def test_staleness_is_measured_and_bounded_by_the_mean_of_all():
    stale = []
    memory.run(
        toys.training(),
        WAGMA(2, sync_period=4),
        1,
        2,
        steps=20,
        step_seconds=[1, 7],
        observe=lambda worker: stale.append(worker.report.staleness),
    )
    assert 2 <= max(stale) <= 2 * 4  # at most as many as all take between two means


def test_a_lost_member_is_left_out_and_the_groups_it_is_in_make_no_mean():
    def lose(memory, worker):
        if worker.index == 1 and worker.count == 3:
            memory.lose(1)

    found = memory.run(
        toys.training(),
        WAGMA(2, sync_period=8),
        1,
        4,
        steps=24,
        events=lose,
        grace=2,
        latency=0.1,
    )
    rest = [found[i] for i in (0, 2, 3)]
    assert sum(worker.count for worker in rest) >= 4 * 24 - 4
    assert max(worker.report.longest for worker in rest) <= 2
    # Less and less of the time goes into asking it.
    assert sum(worker.report.waited for worker in rest) < 60


def test_one_that_is_late_for_the_mean_of_all_takes_over():
    def hold(memory, worker):
        memory.step_seconds[1] = 30 if (worker.index, worker.count) == (1, 3) else 1

    found = memory.run(
        toys.training(),
        WAGMA(2, sync_period=4),
        1,
        2,
        steps=40,
        events=hold,
        grace=3,
        step_seconds=[1, 1],
    )
    assert max(worker.report.longest for worker in found) <= 3
    assert found[1].count > 20 and np.isfinite(toys.stacked(found)).all()


def test_one_that_is_not_finite_is_left_out_and_takes_the_mean_whole():
    task = toys.broken(toys.training(), 1, steps=[3])
    found = memory.run(task, WAGMA(2, 8), 1, 4, steps=12, latency=0.1)
    assert np.isfinite(toys.stacked(found)).all()


def test_alone_it_is_the_base_optimizer():
    found = memory.run(toys.training(), WAGMA(2, 4), 1, 1, steps=5)[0]
    assert found.count == 5 and found.report.bytes_sent == 0


def test_what_it_refuses():
    for given in ({"group_size": 3}, {"sync_period": 0}, {"window": 0}):
        with pytest.raises(ValueError, match=f"`{next(iter(given))}` must be"):
            WAGMA(**given)
    with pytest.raises(ValueError, match="a power of two workers .*, got 3"):
        memory.run(toys.training(), WAGMA(2, 4), 1, 3, steps=5)
