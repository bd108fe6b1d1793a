"""Who of several processes is taken to be lost."""

import ctypes
import signal
import time

import pytest

from train.cluster import key_value_store as coordination
from train.cluster.heartbeat import CRASHED, DONE, LOST, Watch


@pytest.fixture
def watch(monkeypatch):
    """That of process 1 of four, which has looked just now."""
    monkeypatch.setattr(coordination, "process_id", lambda: 1)
    monkeypatch.setattr(coordination, "members", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(coordination, "is_coordinator_there", lambda: True)
    on_signal = ctypes.CDLL(None).signal
    on_signal.argtypes, on_signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    before = on_signal(signal.SIGABRT, None)
    watch = Watch("not joined")
    watch._timeout, watch._looked = 30.0, time.monotonic()
    yield watch
    on_signal(signal.SIGABRT, before)


def seen(watch, **ago):
    """Notes when the processes' signs of life have last changed."""
    for name, (sign, seconds) in ago.items():
        watch._seen[int(name[1:])] = sign, watch._looked - seconds


def test_whose_sign_of_life_is_old_is_lost(watch):
    seen(watch, p0=("7", 0.5), p1=("7", 20.0), p2=("9", 11.0), p3=("8", 12.0))
    assert watch._lost() == [2, 3]


def test_who_is_done_is_not_lost(watch):
    seen(watch, p0=("7", 0.5), p2=(DONE, 100.0), p3=("8", 12.0))
    assert watch._lost() == [3]


def test_whom_the_run_goes_on_without_is_not_lost_again(watch, monkeypatch):
    monkeypatch.setattr(coordination, "members", lambda: [0, 1, 3])
    seen(watch, p0=("7", 0.5), p2=("9", 100.0), p3=("8", 12.0))
    assert watch._lost() == [3]


def test_process_0_is_lost_if_nothing_listens_there(watch, monkeypatch):
    seen(watch, p0=("7", 0.5), p2=("8", 0.5))
    assert watch._lost() == []
    monkeypatch.setattr(coordination, "is_coordinator_there", lambda: False)
    assert watch._lost() == [0]


def test_process_0_is_lost_if_the_service_has_long_been_silent(watch):
    seen(watch, p0=("7", 0.5), p2=("8", 0.5))
    watch._looked -= 11
    assert watch._lost() == [0]


class Ended(Exception):
    """In place of the process."""


@pytest.fixture
def ended(watch, monkeypatch):
    """What the process ended with."""
    ends = []

    def end(status, line):
        ends.append((status, line))
        raise Ended

    monkeypatch.setattr(watch, "_end", end)
    monkeypatch.setattr(coordination, "write", lambda folder, text: None)
    watch.hosts, watch._timeout = ["a", "b", "c", "d"], 0.3
    return ends


def test_an_error_because_somebody_is_lost_names_who(watch, ended, capsys):
    """Also if it comes as a ValueError, as XLA's sometimes do."""
    seen(watch, p0=("7", 0.0), p2=("9", 1.0), p3=("8", 0.0))
    error = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    with pytest.raises(Ended):
        watch._crashed(ValueError, error, None)
    line = "error: process 2 (host c) was lost before training began"
    assert ended == [(LOST, line)] and capsys.readouterr().err == ""


def test_an_error_of_its_own_is_a_crash(watch, ended, capsys):
    seen(watch, p0=("7", 0.0), p2=("9", 0.0), p3=("8", 0.0))
    with pytest.raises(Ended):
        watch._crashed(ValueError, ValueError("no such axis"), None)
    line = "error: this process crashed before training began (ValueError: no such axis)"
    assert ended == [(CRASHED, line)]
    assert capsys.readouterr().err == "ValueError: no such axis\n"
