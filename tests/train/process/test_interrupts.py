"""Ctrl-C before training is never lost, and acts in time."""

import hashlib
import os
import signal
import subprocess
import sys
import threading

import pytest
from outside import python

from train.cluster import rendezvous
from train.cluster.session import Session
from train.cluster.signals import StopSignals
from train.process import interrupts


@pytest.fixture
def listening():
    before = signal.getsignal(signal.SIGINT)
    interrupts.listen()
    yield
    interrupts.listen()
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_is_recorded_and_the_second_interrupts(listening):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:  # an exception that a callback could swallow
        pytest.fail("the first Ctrl-C raised")
    assert interrupts.noted()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()


def test_a_run_interrupted_before_its_first_step_stops_after_it(listening):
    os.kill(os.getpid(), signal.SIGINT)
    with StopSignals(Session()) as signals:
        assert signals.asked() and signals.received == signal.SIGINT


def test_ignored_signals_stay_ignored():
    """nohup ignores SIGHUP, and a script's background job ignores SIGINT."""
    numbers = signal.SIGINT, signal.SIGHUP
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        interrupts.end_at_once()
        interrupts.listen()
        with rendezvous._ended_by_ctrl_c(), StopSignals(Session()):
            assert {signal.getsignal(number) for number in numbers} == {signal.SIG_IGN}
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ctrl_c_is_answered_while_other_code_runs():
    """Hashing is C++ code, too, during which Python calls no handler."""
    order = []
    before = signal.signal(signal.SIGINT, lambda *_: order.append("handled"))
    later = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    later.start()
    with interrupts.answered(lambda: order.append("answered")):
        hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)
    signal.signal(signal.SIGINT, before)
    later.join()
    assert order == ["answered", "handled"]
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_during_imports_prints_one_line():
    program = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["digits"]  # --help does not import jax
runpy.run_module("train", run_name="__main__", alter_sys=True)
"""
    ended = python("-c", program)
    line = "interrupted before training began; nothing was lost\n"
    assert (ended.returncode, ended.stderr) == (130, line)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.2, 2.5, 5.5])
def test_ctrl_c_ends_the_run_at_any_time(tmp_path, seconds):
    command = [sys.executable, "-m", "train", "digits", "--steps", "1000000"]
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [*command, "--run-dir", str(folder)], stderr=subprocess.PIPE, text=True
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=90)
    assert process.returncode == 130 and "Traceback" not in printed
