"""Seconds of training, by a clock that is set by hand."""

import time

import pytest

from train.run.stopwatch import Stopwatch


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
