"""Steps are granted once; rounds are equal for all, and close without absent workers."""

import pytest

from lsgd_jax._src.asynchronous.engine.coordinator import KEPT, Coordinator
from lsgd_jax.asynchronous import WorkerReport


def test_a_step_that_is_claimed_again_counts_once_and_fast_workers_take_more():
    c = Coordinator(workers=2, steps=4, period=2)
    assert [c.claim(0, s).go for s in (1, 2, 2, 1, 3)] == ["step"] * 5
    assert c.claim(1, 1).go == "step" and c.taken == 4
    assert (c.claim(0, 4).go, c.claim(1, 2).go) == ("join", "join")
    assert c.arrive(("join", 0), 0, "a", [0, 1]) is None
    assert c.arrive(("join", 0), 1, "b", [0, 1]) == {0: "a", 1: "b"}
    assert c.number == 1 and [c.claim(1, s).go for s in (2, 3, 4, 5)] == ["step"] * 4
    assert c.claim(0, 4).go == "join"
    c.arrive(("join", 1), 0, None, [0, 1]), c.arrive(("join", 1), 1, None, [0, 1])
    assert (c.claim(0, 4).go, c.claim(1, 6).go, c.taken) == ("stop", "stop", 8)


def test_a_worker_that_comes_late_was_absent_and_gets_what_was_closed():
    c = Coordinator(workers=3, steps=9, period=1)
    for i in range(3):
        c.claim(i, 1)
    for i in range(2):
        assert c.arrive(("join", 0), i, i, range(3)) is None
    c.close(("join", 0))
    assert c.present == [0, 1]
    assert c.arrive(("join", 0), 2, 2, range(3)) == {0: 0, 1: 1} and c.present == [0, 1, 2]
    # The budget is that of the workers that were there.
    assert [c.claim(0, s).go for s in (2, 3, 4)] == ["step", "step", "join"]


def test_a_round_closes_when_the_last_one_that_is_waited_for_leaves():
    c = Coordinator(workers=2, steps=9)
    assert c.arrive("sum", 0, 1.0, [0, 1]) is None
    c.leave(1)
    assert c.arrive("sum", 0, 1.0, [0, 1]) == {0: 1.0}


def test_a_round_waits_for_the_members_that_all_arrivals_name():
    c = Coordinator(workers=3, steps=9)
    for i in range(3):
        c.claim(i, 1)
    assert c.arrive("elect", 0, 1.0, [0, 1, 2]) is None
    assert c.arrive("elect", 2, 3.0, [0, 2]) == {0: 1.0, 2: 3.0}


def test_a_late_arrival_at_a_forgotten_round_is_an_error():
    c = Coordinator(workers=1, steps=9)
    for k in range(KEPT + 1):
        c.arrive(k, 0, None, [0])
    with pytest.raises(KeyError):
        c.arrive(0, 0, None, [0])


def test_the_leader_is_the_best_present_worker_that_is_finite():
    c = Coordinator(workers=4, steps=9)
    for i, score in enumerate([3.0, 2.0, float("nan"), 2.0]):
        status = c.report(i, WorkerReport(score=score))
    assert status.leader(range(4)) == 1 and status.leader([2]) is None
    c.leave(1)
    assert c.status().leader(range(4)) == 3


def test_rounds_of_many_groups_at_a_time_are_all_held():
    coordinator = Coordinator(workers=1200, steps=1)
    for turn in range(2):
        for i in range(0, 1200, 2):
            assert coordinator.arrive((turn, i), i, "a", [i, i + 1]) is None
        for i in range(0, 1200, 2):
            both = {i: "a", i + 1: "b"}
            assert coordinator.arrive((turn, i), i + 1, "b", [i, i + 1]) == both
    assert coordinator.arrive((0, 0), 0, "c", [0, 1]) == {0: "a", 1: "b"}


def test_lost_steps_are_taken_again_and_those_taken_over_count_once():
    c = Coordinator(workers=2, steps=4)
    c.enter(0, 0), c.enter(1, 0)
    c.arrive("begin", 0, None, [0, 1]), c.arrive("begin", 1, None, [0, 1])
    assert [c.claim(0, s).go for s in (1, 2, 3)] == ["step"] * 3
    assert c.enter(0, 0) == ([0, 1], True) and c.enter(0, 2)[1]  # from another one
    assert c.claim(0, 3).go == "step" and c.taken == 4
    c.leave(1)
    c.enter(0, 0), c.enter(0, 1)  # from a checkpoint
    assert c.taken == 2


def test_earlier_steps_of_a_worker_that_enters_after_the_start_count():
    """All were lost after a checkpoint at step 300; the second one comes back late."""
    c = Coordinator(workers=2, steps=400)
    c.enter(0, 300), c.arrive("begin", 0, None, [0])
    assert c.begun and c.taken == 300
    c.enter(1, 300)
    assert c.taken == 600
    c.enter(1, 310)  # from worker 0, which has counted these
    assert c.taken == 600


def test_a_worker_that_has_finished_is_not_waited_for_and_may_be_taken_over_from():
    c = Coordinator(workers=2, steps=4)
    c.enter(0, 0), c.enter(1, 0)
    assert c.arrive("sum", 1, 1.0, [0, 1]) is None
    c.finish(0, WorkerReport(steps=2))
    assert c.arrive("sum", 1, 1.0, [0, 1]) == {1: 1.0}
    status = c.report(1, WorkerReport(steps=1))
    assert (status.present, status.finished) == ([1], [0])
    assert [status.reports[i].steps for i in range(2)] == [2, 1]
    c.enter(0, 2)
    assert c.status().finished == []
