"""python -m train with asynchronous workers on Ray: a killed worker, a stop, resuming."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest


ROOT = pathlib.Path(__file__).parents[2]
LIMIT_S = 240
pytestmark = pytest.mark.slow


def start(folder, *options):
    command = "digits --method async-lsgd --workers.nodes 1 --workers.locals 3".split()
    pull = "--method.local-period 4 --method.global-period 16 --log-every 2".split()
    return subprocess.Popen(
        [sys.executable, "-m", "train", *command, *pull, "--run-dir", folder, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )


def paces(folder):
    """The events of a run that report the progress of each worker."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    events = (json.loads(line) for line in lines if line.endswith("}"))
    return [event for event in events if event["kind"] == "pace"]


def wait_until(holds, process):
    until = time.monotonic() + LIMIT_S
    while not holds():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.2)


def in_session(process, name):
    """The process ids of a run's processes with this name."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,sid,args"], capture_output=True, text=True, check=True
    )
    rows = (line.split(None, 2) for line in listed.stdout.splitlines()[1:])
    return [int(p) for p, sid, args in rows if sid == str(process.pid) and name in args]


def test_a_run_survives_a_killed_worker_and_resumes_after_a_stop(tmp_path):
    """Begun with workers of two devices each, resumed with fewer workers of one."""
    folder = tmp_path / "run"
    process = start(folder, "--steps", "100000", "--workers.inside", "fsdp=2")
    try:
        wait_until(lambda: len(paces(folder)) > 2, process)
        os.kill(in_session(process, "ray::WorkerActor")[0], signal.SIGKILL)
        wait_until(lambda: len(paces(folder)[-1]["present"]) == 2, process)
        wait_until(lambda: len(paces(folder)[-1]["present"]) == 3, process)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert re.search(r"warning: worker \d is down at its step \d+", out)
    assert "is back" in out and "saved; to resume: python -m train digits" in out
    assert "Traceback" not in out
    step = max(int(path.name) for path in (folder / "checkpoints").glob("[0-9]*"))

    process = start(folder, "--resume", "--steps", str(step + 20), "--workers.locals", "2")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and "everything is in" in out
    last = paces(folder)[-1]
    assert len(last["steps"]) == 2 and np.mean(last["steps"]) >= step + 19
    wait_until_gone = time.monotonic() + 60
    while in_session(process, "raylet") and time.monotonic() < wait_until_gone:
        time.sleep(0.5)
    assert not in_session(process, "raylet")
