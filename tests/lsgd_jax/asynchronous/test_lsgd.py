"""Leader SGD whose workers pull towards snapshots that arrive when they do."""

import numpy as np
import pytest
import toys

from lsgd_jax._src.asynchronous import memory
from lsgd_jax.asynchronous import LSGD


FOLLOW = LSGD(local_pull=0.5, global_pull=0.25, local_period=2, global_period=4)


@pytest.fixture
def apart(monkeypatch):
    """Workers that start where the task says, wherever that is."""
    monkeypatch.setattr("zlib.crc32", lambda data: 0)


def test_workers_are_pulled_to_the_leaders_that_were_chosen(apart):
    """By hand: nodes (0, 1), (2, 3), worker i at i with loss 1 + i: 0 and 2 lead."""
    seen = {}

    def note(worker):
        seen.setdefault(worker.index, []).append(toys.positions([worker])[0])

    memory.run(toys.resting(), FOLLOW, 2, 2, steps=8, observe=note, latency=0.5)
    path = {i: list(dict.fromkeys(seen[i])) for i in seen}
    assert path[0] == [4.0 * 0] or set(path[0]) == {0.0}  # the leader of all is not moved
    # Worker 1 goes half the way to 0, then at a global pull half and a quarter of the rest.
    assert path[1][:3] == [1.0, 0.5, 0.5 * 0.5 * 0.75]
    # Worker 2 leads its node: only the leader of all moves it.
    assert path[2][:2] == [2.0, 1.5]
    # Worker 3 goes towards 2, which is at 2 at first.
    assert path[3][:2] == [3.0, 2.5]


def test_fast_workers_take_more_steps_and_wait_for_no_other():
    workers = memory.run(
        toys.training(),
        FOLLOW,
        2,
        2,
        steps=30,
        step_seconds=[1, 1, 1, 10],
        latency=0.4,
    )
    counts = [worker.count for worker in workers]
    assert sum(counts) == 4 * 30 and min(counts[:3]) >= 9 * (counts[3] - 1)
    assert max(worker.report.waited for worker in workers) == 0
    assert max(worker.report.staleness for worker in workers) >= 1
    assert sum(worker.report.bytes_sent for worker in workers) > 0
    assert np.ptp(toys.stacked(workers), axis=0).max() < 3


def test_a_late_snapshot_is_pulled_to_as_it_was(apart):
    workers = memory.run(toys.resting(), FOLLOW, 1, 2, steps=12, latency=3.0)
    assert workers[1].report.staleness == 3 and toys.positions(workers)[0] == 0
    assert 0 < toys.positions(workers)[1] < 0.5


def test_a_leader_that_is_lost_or_hangs_leads_no_more(apart):
    for how in ("lost", "hung"):

        def fail(memory, worker, how=how):
            if worker.index == 0 and worker.count == 3:
                getattr(memory, how).add(0)

        workers = memory.run(
            toys.resting(),
            FOLLOW,
            1,
            3,
            steps=40,
            events=fail,
            grace=2,
            latency=0.2,
        )
        # The next best leads then: the others come together away from where 0 was.
        assert toys.positions(workers)[2] == pytest.approx(
            toys.positions(workers)[1], abs=0.02
        )
        assert max(worker.report.longest for worker in workers[1:]) == 0


def test_one_that_is_not_finite_never_leads_and_takes_the_leader_whole(apart):
    task = toys.broken(toys.resting(), 0, steps=[2])
    workers = memory.run(task, FOLLOW, 1, 3, steps=24)
    assert np.isfinite(toys.stacked(workers)).all()


def test_one_that_starts_again_counts_no_step_twice():
    lost = []

    def lose(memory, worker):
        if worker.index == 2 and worker.count == 9 and not lost:
            lost.append(worker)
            memory.lose(2)

    workers = memory.run(
        toys.training(), FOLLOW, 1, 3, steps=20, events=lose, restarts=True, grace=2
    )
    assert workers[2] is not lost[0] and workers[2].count >= 15
    assert abs(sum(worker.count for worker in workers) - 60) <= 3


def test_alone_it_is_the_base_optimizer():
    workers = memory.run(toys.training(), FOLLOW, 1, 1, steps=5)
    off = memory.run(toys.training(), LSGD(0.0, 0.0), 1, 1, steps=5)
    np.testing.assert_array_equal(toys.stacked(workers), toys.stacked(off))


@pytest.mark.parametrize(
    "given", [{"local_pull": 2.0}, {"global_period": 0}, {"loss_window": 0}]
)
def test_what_it_refuses(given):
    with pytest.raises(ValueError, match=f"`{next(iter(given))}` must be"):
        LSGD(**given)
