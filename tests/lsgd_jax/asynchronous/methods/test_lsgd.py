"""Asynchronous Leader SGD: pulls towards snapshots of the elected leaders."""

import pytest
import toys

from lsgd_jax.asynchronous import LSGD


FOLLOW = LSGD(local_pull=0.5, global_pull=0.25, local_period=2, global_period=4)


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Lets workers start from different parameters."""
    monkeypatch.setattr("zlib.crc32", lambda data: 0)


def test_workers_are_pulled_to_the_leaders_of_their_node_and_of_all():
    """By hand: nodes (0, 1), (2, 3), worker i at i with loss 1 + i: 0 and 2 lead."""
    note, seen = toys.noting(toys.position)
    toys.simulate(toys.resting(), FOLLOW, 2, 2, 8, [1, 1.01, 1.02, 1.03], observe=note)
    path = {i: list(dict.fromkeys(seen[i])) for i in seen}
    assert path[0] == [0.0]  # the leader of all is not moved
    # Worker 1 goes half the way to 0, then at a global pull half and a quarter of the rest.
    assert path[1][:3] == [1.0, 0.5, 0.5 * 0.5 * 0.75]
    # Worker 2 leads its node: only the leader of all moves it.
    assert path[2][:2] == [2.0, 1.5]
    # Worker 3 goes towards 2, which is at 2 at first.
    assert path[3][:2] == [3.0, 2.5]


def test_a_worker_is_pulled_to_a_late_snapshot_as_it_was():
    workers = toys.simulate(toys.resting(), FOLLOW, 1, 2, 12, [1, 1.01], latency=0.45)
    assert workers[1].report.staleness == 1 and toys.position(workers[0]) == 0
    assert 0 < toys.position(workers[1]) < 0.5


@pytest.mark.parametrize("how", [{"drops": {0: 3.5}}, {"hangs": {0: 3.5}}])
def test_a_leader_that_fails_or_hangs_leads_no_more(how):
    options = dict(timeout=2, **how)
    workers = toys.simulate(toys.resting(), FOLLOW, 1, 3, 40, [1, 1.1, 1.2], **options)
    # The next best leads then: the others meet where it is, not where worker 0 was.
    first, second = map(toys.position, workers[1:])
    assert second == pytest.approx(first, abs=0.02) and first > 0.1
    assert max(worker.report.longest for worker in workers[1:]) < 0.1
