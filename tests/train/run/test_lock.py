"""One process holds a run folder: who is refused, who takes over, who finds out."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import pytest

from train.__main__ import main
from train.cluster.session import Session
from train.metrics.progress import Progress
from train.run import lock, open
from train.run.lock import LOCK, OWNER, RunLock


ROOT = pathlib.Path(__file__).parents[3]
LEASE_S, RENEWAL_S = 1.0, 0.1

# Holds the folder it is given until it is ended.
HOLDER = f"""
import pathlib, sys, time
from train.run import lock
lock.LEASE_S, lock.RENEWAL_S = {LEASE_S}, {RENEWAL_S}
held = lock.RunLock(pathlib.Path(sys.argv[1]), print, print)
held.sign()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(lock, "LEASE_S", LEASE_S)
    monkeypatch.setattr(lock, "RENEWAL_S", RENEWAL_S)


@contextlib.contextmanager
def holder(folder):
    """Another process, which holds a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def other(tmp_path):
    """Another process, which holds the test's folder."""
    with holder(tmp_path) as process:
        yield process


def hold(folder, lost=None):
    """The lock, and what it has said."""
    said = []
    held = RunLock(folder, said.append, lost or said.append)
    held.sign()
    return held, said


def as_if_of_another_host(folder):
    path = folder / LOCK
    lines = path.read_text().splitlines(keepends=True)
    changed = ["host=elsewhere\n" if line.startswith("host=") else line for line in lines]
    (folder / "new").write_text("".join(changed))
    (folder / "new").replace(path)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_second_process_is_told_who_holds_the_folder(tmp_path, other):
    line = rf"^process {other.pid} on host \S+ holds {tmp_path} since 2\d\d\d-\S+ \S+; end"
    for _ in range(2):
        with pytest.raises(ValueError, match=line):
            hold(tmp_path)
    other.kill()
    other.wait()
    held, said = hold(tmp_path)  # at once: the dead hold nothing
    assert said == []
    held.release()
    assert not (tmp_path / LOCK).exists()


def test_a_run_that_another_process_trains_is_not_touched(copied, capsys):
    folder = pathlib.Path(copied.run_dir)
    with holder(folder) as other:
        before = {path: path.stat().st_mtime_ns for path in folder.glob("[!l]*")}
        assert main(["digits", "--resume", "--run-dir", str(folder)]) == 2
        assert before == {path: path.stat().st_mtime_ns for path in folder.glob("[!l]*")}
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: process {other.pid} on host")
    assert captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("network", [False, True])
def test_the_lease_of_another_host_runs_out(tmp_path, other, monkeypatch, network):
    if network:  # where files cannot change places
        monkeypatch.setattr("filelock._soft.exchange_names", lambda *paths: False)
    other.kill()
    other.wait()
    as_if_of_another_host(tmp_path)
    began = time.monotonic()
    held, (said,) = hold(tmp_path)
    assert time.monotonic() - began >= LEASE_S
    assert f"process {other.pid} on host elsewhere holds" in said
    assert f"pid={os.getpid()}\n" in (tmp_path / LOCK).read_text()
    held.release()


def test_another_host_that_renews_its_lease_is_not_disturbed(tmp_path, other):
    other.kill()
    other.wait()
    as_if_of_another_host(tmp_path)
    before = (tmp_path / LOCK).read_text()
    ended = threading.Event()

    def renew():
        while not ended.wait(RENEWAL_S):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ValueError, match="on host elsewhere holds"):
            hold(tmp_path)
    finally:
        ended.set()
        thread.join()
    assert (tmp_path / LOCK).read_text() == before


def test_who_lost_the_folder_finds_out(tmp_path, other):
    """After a pause, say, in which another process has taken it over."""
    theirs = (tmp_path / LOCK).read_text()
    other.kill()
    other.wait()
    lost = []
    held, _ = hold(tmp_path, lost.append)
    held.check()
    assert lost == []
    (tmp_path / "new").write_text(theirs)
    (tmp_path / "new").replace(tmp_path / LOCK)
    as_if_of_another_host(tmp_path)
    held.check()  # at once, before anything is saved
    assert len(lost) == 1
    until(lambda: len(lost) > 1)
    assert lost[0] == lost[1]
    assert lost[0].startswith(f"process {other.pid} on host elsewhere holds {tmp_path}")
    assert lost[0].endswith(", which has taken it over")
    held.release()
    assert (tmp_path / LOCK).exists()  # it is the other's


def test_who_was_frozen_until_the_next_run_had_ended_finds_out(tmp_path, monkeypatch):
    lost = []
    frozen, _ = hold(tmp_path, lost.append)
    with monkeypatch.context() as patch:
        patch.setattr(lock, "TOKEN", "of another process")
        hold(tmp_path)[0].release()
    assert not (tmp_path / LOCK).exists()
    frozen.check()
    assert f"took {tmp_path} over at 2" in lost[0] and lost[0].endswith(", and has ended")
    until(lambda: len(lost) > 1)


def test_a_folder_that_is_not_the_runs_is_not_written_to(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    held, _ = hold(folder, pytest.fail)
    folder.rename(tmp_path / "moved")
    for make in (lambda: None, folder.mkdir):
        make()
        with pytest.raises(FileNotFoundError, match="gone or was moved"):
            held.check()
    (folder / OWNER).write_bytes((tmp_path / "moved" / OWNER).read_bytes())
    held.check()


def test_a_folder_that_is_gone_is_lost_only_to_another_process(tmp_path, other):
    theirs = (tmp_path / LOCK).read_text()
    other.kill()
    other.wait()
    folder, lost = tmp_path / "run", []
    folder.mkdir()
    held, _ = hold(folder, lost.append)
    shutil.rmtree(folder)
    time.sleep(5 * RENEWAL_S)
    assert lost == []
    folder.mkdir()
    (folder / LOCK).write_text(theirs)
    until(lambda: lost)
    held.release()


def test_a_process_may_open_its_run_again(tmp_path):
    lost = []
    first, _ = hold(tmp_path, lost.append)
    second, said = hold(tmp_path, lost.append)
    time.sleep(5 * RENEWAL_S)
    first.release()
    assert lost == said == [] and (tmp_path / LOCK).exists()
    second.release()
    assert not (tmp_path / LOCK).exists()


def test_what_is_dropped_is_released(tmp_path):
    held, _ = hold(tmp_path)
    del held
    assert not (tmp_path / LOCK).exists()


def test_a_run_that_lost_its_folder_ends_at_once(tmp_path, monkeypatch, capsys):
    made, statuses = [], []
    monkeypatch.setattr(open, "RunLock", lambda folder, say, lost: made.append(lost))
    monkeypatch.setattr(os, "_exit", statuses.append)
    open.hold(tmp_path, Session(), Progress(1))
    made[0]("process 5 on host a holds run, which has taken it over")
    assert statuses == [1]
    line = "error: process 5 on host a holds run, which has taken it over; this run has st"
    assert capsys.readouterr().err.startswith(line)
