"""One process holds a run folder: others are refused, take over, or find out."""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest
from outside import ROOT, until
from toys import slow

from train.__main__ import main
from train.cluster.session import Session
from train.metrics.progress import Progress
from train.run import lock, open
from train.run.lock import LOCK, OWNER, RunLock


LEASE_S, RENEWAL_S = 1.0, 0.1

# Holds the folder it is given until it is killed.
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
    """Another process that holds a folder."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def hold(folder, lost=None):
    """The lock, and the lines that it said."""
    said = []
    held = RunLock(folder, said.append, lost or said.append)
    held.sign()
    return held, said


def hold_elsewhere(folder):
    """Writes the lease of process 47 on another host to a folder."""
    scratch = folder / "scratch"
    scratch.mkdir()
    held, _ = hold(scratch)
    mine = (scratch / LOCK).read_text().splitlines(keepends=True)
    held.release()
    theirs = {"host": "host=elsewhere\n", "pid": "pid=47\n"}
    changed = [theirs.get(line.partition("=")[0], line) for line in mine]
    (scratch / LOCK).write_text("".join(changed))
    (scratch / LOCK).replace(folder / LOCK)
    shutil.rmtree(scratch)


@pytest.mark.slow
def test_a_second_process_is_refused_and_changes_nothing(copied, capsys):
    folder = pathlib.Path(copied.run_dir)
    with holder(folder) as other:
        before = {path: path.stat().st_mtime_ns for path in folder.glob("[!l]*")}
        assert main(["digits", "--resume", "--run-dir", str(folder)]) == 2
        assert before == {path: path.stat().st_mtime_ns for path in folder.glob("[!l]*")}
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and captured.out == ""
        line = rf"process {other.pid} on host \S+ holds {folder} since 2\d\d\d-\S+ \S+; end"
        with pytest.raises(ValueError, match=line) as caught:
            hold(folder)
        assert captured.err == f"error: {caught.value}\n"
    held, said = hold(folder)  # at once, because a dead process holds nothing
    assert said == []
    held.release()
    assert not (folder / LOCK).exists()


def test_the_lock_of_a_killed_process_is_removed_but_not_that_of_a_living_one(tmp_path):
    with holder(tmp_path) as process:
        lock.remove_left(tmp_path, patience=0.3)
        assert (tmp_path / LOCK).exists()
        process.kill()
        lock.remove_left(tmp_path, patience=5.0)
        assert not (tmp_path / LOCK).exists()
    lock.remove_left(tmp_path / "none", patience=5.0)


@pytest.mark.parametrize("network", [False, slow(True)])
def test_the_lease_of_another_host_expires(tmp_path, monkeypatch, network):
    if network:  # where files cannot be exchanged; filelock 4.3 has moved the function
        names = [x for x in sys.modules if x.partition(".")[0] == "filelock"]
        users = [x for x in names if "exchange_names" in vars(sys.modules[x])]
        assert users
        for name in users:
            monkeypatch.setattr(f"{name}.exchange_names", lambda *paths: False)
    hold_elsewhere(tmp_path)
    began = time.monotonic()
    held, (said,) = hold(tmp_path)
    assert time.monotonic() - began >= LEASE_S
    assert "process 47 on host elsewhere holds" in said
    assert f"pid={os.getpid()}\n" in (tmp_path / LOCK).read_text()
    held.release()


def test_another_host_that_renews_its_lease_keeps_it(tmp_path):
    hold_elsewhere(tmp_path)
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


def test_a_process_finds_out_that_another_one_took_its_folder(tmp_path):
    """For example after a pause, in which the folder was gone."""
    folder, lost = tmp_path / "run", []
    folder.mkdir()
    held, _ = hold(folder, lost.append)
    held.check()
    shutil.rmtree(folder)
    time.sleep(5 * RENEWAL_S)
    assert lost == []  # no other process has taken it
    folder.mkdir()
    hold_elsewhere(folder)
    held.check()  # at once, before anything is saved
    assert lost
    until(lambda: len(lost) > 1)  # in the other thread
    line = f"process 47 on host elsewhere holds {folder}, which has taken it over"
    assert set(lost) == {line}
    held.release()
    assert (folder / LOCK).exists()  # the other process holds it


def test_a_process_that_was_frozen_until_the_next_run_ended_finds_out(
    tmp_path, monkeypatch
):
    lost = []
    frozen, _ = hold(tmp_path, lost.append)
    with monkeypatch.context() as patch:
        patch.setattr(lock, "TOKEN", "of another process")
        hold(tmp_path)[0].release()
    assert not (tmp_path / LOCK).exists()
    frozen.check()
    assert f"took {tmp_path} over at 2" in lost[0] and lost[0].endswith(", and has ended")
    until(lambda: len(lost) > 1)


def test_a_folder_with_the_name_of_a_moved_run_folder_is_not_written_to(tmp_path):
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


def test_a_process_may_open_its_run_again_and_drops_its_locks(tmp_path):
    lost = []
    first, _ = hold(tmp_path, lost.append)
    second, said = hold(tmp_path, lost.append)
    time.sleep(5 * RENEWAL_S)
    first.release()
    assert lost == said == [] and (tmp_path / LOCK).exists()
    del second
    assert not (tmp_path / LOCK).exists()


def test_a_file_system_that_became_read_only(tmp_path, monkeypatch, capsys):
    """The run ends without a traceback, and a resumption names the file system."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    held, _ = hold(tmp_path, pytest.fail)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        held.release()
    assert (tmp_path / LOCK).exists()
    hold_elsewhere(tmp_path)  # its process is dead, but no other host can tell
    monkeypatch.setattr(pathlib.Path, "touch", refuse)
    line = f"{tmp_path} cannot be written to: Read-only file system"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        open.hold(tmp_path, Session(), Progress(1))
    assert capsys.readouterr() == ("", "")  # at once
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, OWNER}


def test_a_run_that_lost_its_folder_exits_at_once(tmp_path, monkeypatch, capsys):
    made, statuses = [], []
    monkeypatch.setattr(open, "RunLock", lambda folder, say, lost: made.append(lost))
    monkeypatch.setattr(os, "_exit", statuses.append)
    open.hold(tmp_path, Session(), Progress(1))
    made[0]("process 5 on host a holds run, which has taken it over")
    assert statuses == [1]
    line = "error: process 5 on host a holds run, which has taken it over; this run has st"
    assert capsys.readouterr().err.startswith(line)
