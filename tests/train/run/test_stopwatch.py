"""Seconds of training, by a clock that is set by hand."""

import time

import pytest

from train.run.stopwatch import Pace, Stopwatch


def test_only_training_is_counted(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stopwatch = Stopwatch(seconds=5.0)
    now += 7
    assert stopwatch.seconds == 5
    stopwatch.start()
    now += 2
    assert stopwatch.seconds == 7
    with pytest.raises(ValueError), stopwatch.paused():
        now += 50
        assert stopwatch.seconds == 7
        raise ValueError
    now += 1
    assert stopwatch.seconds == 8


def test_the_pace_is_that_of_steps_which_were_not_waited_for():
    """Reported every 8 steps, and the last ones as soon as they were waited for."""
    pace = Pace(at_least=4)
    assert pace(7, 30.0) is None  # with the compilation
    assert pace(15, 34.0) == 2
    assert pace(16, 34.01) == 2
    assert pace(31, 38.0) == 4
