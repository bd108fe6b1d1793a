"""Which processes are taken to hang: no time passes but by a clock that is set."""

import pytest

from train.cluster import standstill
from train.cluster.standstill import Standstill
from train.cluster.work import Report


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the start, as the only element of a list."""
    now = [0.0]
    monkeypatch.setattr(standstill.time, "monotonic", lambda: now[0])
    return now


def look(watch, counts, stopping=False, slowest=1.0):
    """The processes that hang, if those have begun so many pieces of work."""
    reports = {i: Report(count, "at work", slowest, 9) for i, count in enumerate(counts)}
    hung = watch.look(reports, stopping)
    return None if hung is None else hung.processes


def test_one_that_the_others_wait_for_hangs_after_ten_minutes(clock):
    watch = Standstill(None)
    assert look(watch, [5, 5, 5]) is None
    clock[0] = 1.0
    assert look(watch, [7, 5, 7]) is None
    clock[0] = 599.0
    assert look(watch, [7, 5, 7]) is None
    clock[0] = 602.0
    assert look(watch, [7, 5, 7]) == [1]
    assert look(watch, [7, 6, 7]) is None  # it goes on


def test_slow_work_has_more_time(clock):
    watch = Standstill(None)
    look(watch, [7, 5])
    clock[0] = 1500.0
    assert look(watch, [7, 5], slowest=200.0) is None
    clock[0] = 2001.0
    assert look(watch, [7, 5], slowest=200.0) == [1]


def test_where_all_do_the_same_it_may_just_take_long(clock):
    watch = Standstill(100)
    look(watch, [5, 5])
    clock[0] = 599.0
    assert look(watch, [5, 5]) is None
    clock[0] = 601.0
    assert look(watch, [5, 5]) == [0, 1]


def test_the_limit_can_be_set_or_left_out(clock):
    watch, never = Standstill(30), Standstill(0)
    for each in (watch, never):
        look(each, [7, 5])
    clock[0] = 31.0
    assert look(watch, [7, 5]) == [1]
    clock[0] = 1e9
    assert look(never, [7, 5]) is None


def test_a_run_that_is_to_stop_waits_for_a_minute(clock):
    """Also if there is no limit otherwise."""
    for timeout in (None, 0):
        clock[0] = 0.0
        watch = Standstill(timeout)
        look(watch, [7, 5])
        clock[0] = 59.0
        assert look(watch, [7, 5], stopping=True) is None
        clock[0] = 61.0
        assert look(watch, [7, 5], stopping=True) == [1]
