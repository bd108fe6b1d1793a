"""Steps are granted once, rounds are the same for all, and end without who is absent."""

import pytest

from lsgd_jax._src.asynchronous.coordinator import KEPT, Coordinator
from lsgd_jax.asynchronous import Report


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


def test_one_that_has_not_come_is_absent_until_it_is_heard_of_and_gets_what_was_closed():
    c = Coordinator(workers=3, steps=9, period=1)
    for i in range(3):
        c.claim(i, 1)
    for i in range(2):
        assert c.arrive(("join", 0), i, i, range(3)) is None
    assert c.close(("join", 0)) == {0: 0, 1: 1} and c.present == [0, 1]
    assert c.arrive(("join", 0), 2, 2, range(3)) == {0: 0, 1: 1} and c.present == [0, 1, 2]
    # The budget is that of those who were there.
    assert [c.claim(0, s).go for s in (2, 3, 4)] == ["step", "step", "join"]


def test_a_round_closes_when_the_last_one_that_is_waited_for_leaves():
    c = Coordinator(workers=2, steps=9)
    assert c.arrive("sum", 0, 1.0, [0, 1]) is None
    c.leave(1)
    assert c.look("sum") == {0: 1.0}


def test_a_round_waits_for_those_whom_all_who_have_come_name():
    c = Coordinator(workers=3, steps=9)
    for i in range(3):
        c.claim(i, 1)
    assert c.arrive("elect", 0, 1.0, [0, 1, 2]) is None
    assert c.arrive("elect", 2, 3.0, [0, 2]) == {0: 1.0, 2: 3.0}


def test_what_is_long_over_is_forgotten_and_said_to_be():
    c = Coordinator(workers=1, steps=9)
    for k in range(KEPT + 1):
        c.arrive(k, 0, None, [0])
    with pytest.raises(KeyError):
        c.arrive(0, 0, None, [0])


def test_the_leader_is_the_best_that_is_there_and_finite():
    c = Coordinator(workers=4, steps=9)
    for i, score in enumerate([3.0, 2.0, float("nan"), 2.0]):
        standing = c.report(i, Report(score=score))
    assert standing.leader(range(4)) == 1 and standing.leader([2]) is None
    c.leave(1)
    assert c.standing().leader(range(4)) == 3


def test_rounds_of_many_groups_at_a_time_are_all_held():
    coordinator = Coordinator(workers=1200, steps=1)
    for turn in range(2):
        for i in range(0, 1200, 2):
            assert coordinator.arrive((turn, i), i, "a", [i, i + 1]) is None
        for i in range(0, 1200, 2):
            both = {i: "a", i + 1: "b"}
            assert coordinator.arrive((turn, i), i + 1, "b", [i, i + 1]) == both
    assert coordinator.look((0, 0)) == {0: "a", 1: "b"}


def test_what_one_alone_has_lost_is_taken_again_and_what_it_takes_over_counts_once():
    c = Coordinator(workers=2, steps=4)
    c.arrive("begin", 0, None, [0, 1]), c.arrive("begin", 1, None, [0, 1])
    assert [c.claim(0, s).go for s in (1, 2, 3)] == ["step"] * 3
    assert c.enter(0, 0) == ([0, 1], True) and c.enter(0, 2)[1]  # from another one
    assert c.claim(0, 3).go == "step" and c.taken == 4
    c.leave(1)
    c.enter(0, 0), c.enter(0, 1)  # from a checkpoint
    assert c.taken == 2
