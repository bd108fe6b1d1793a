"""Seconds of training, measured with a fake clock."""

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


def test_compilation_is_counted_apart(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stopwatch = Stopwatch(seconds=5.0)
    stopwatch.start()
    now += 30
    stopwatch.start()  # asynchronous workers have taken their first step
    now += 1
    with stopwatch.compiling():
        now += 4
    now += 2
    assert (stopwatch.seconds, stopwatch.compile_seconds) == (8, 34)


def test_the_pace_ignores_steps_that_were_waited_for():
    """Reports come every 8 steps, and once just after waiting for the last steps."""
    pace = Pace(at_least=4)
    assert pace(7, 30.0) is None  # includes the compilation
    assert pace(15, 34.0) == 2
    assert pace(16, 34.01) == 2
    assert pace(31, 38.0) == 4
