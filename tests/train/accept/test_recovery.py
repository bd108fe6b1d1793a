"""Children that do not do what a killed run does. `test_accept.py` has one that does."""

import signal
import subprocess
import sys

import pytest

from train import launch
from train.accept import recovery
from train.accept.recovery import Killed
from train.cluster.session import Session


def child(text):
    """Starts Python in place of a killed run."""

    def start(*_):
        options = dict(stdout=subprocess.PIPE, text=True)
        return subprocess.Popen([sys.executable, "-c", text], **options)

    return start


@pytest.mark.parametrize(
    "text, patience, reason",
    [
        ("print('error: no device'); exit(2)", 30, "ended with status 2: error: no device"),
        ("import time; time.sleep(60)", 0.3, "was not killed within 0 s: it printed noth"),
        (
            "print('accept: [\".\", 0, 2]')",
            0.3,
            "lacks ended-1: do all processes see this folder?",
        ),
    ],
    ids=["refused", "hanging", "alone"],
)
def test_a_child_that_is_not_killed_is_reported(
    text, patience, reason, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "start", child(text))
    killed = recovery.kill([], patience)
    assert isinstance(killed, str) and reason in killed
    (found,) = recovery.check(killed, None, Session())
    assert found.verdict == "failed" and reason in found.reason


def test_a_child_that_is_killed_tells_where_its_run_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "import os; print('accept: [\".\", 0, 1]', flush=True); os.kill(os.getpid(), 9)"
    monkeypatch.setattr(launch, "start", child(text))
    killed = recovery.kill([], patience=30)
    assert isinstance(killed, Killed) and killed.statuses == [-signal.SIGKILL]
