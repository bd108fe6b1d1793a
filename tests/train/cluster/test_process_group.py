"""Processes that are started, watched and ended together: small programs."""

import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from train.cluster.process_group import ProcessGroup


LIMIT_S = 60
COUNT = 3

HEAD = """
import os, pathlib, signal, subprocess, sys, time
me = int(sys.argv[1])
def note(name=f'pid-{me}', pid=os.getpid()):
    pathlib.Path(name).write_text(str(pid))
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The programs write here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def group(program, count=COUNT, grace=0.3, **options):
    """So many processes of a program, which knows its number as `me`."""
    commands = [[sys.executable, "-S", "-c", HEAD + program, str(i)] for i in range(count)]
    return ProcessGroup(commands, [os.environ] * count, grace, **options)


def written(folder, count, name="pid-*"):
    """The numbers in files that the programs write, once there are so many."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        texts = [path.read_text() for path in folder.glob(name)]
        if len(texts) == count and all(texts):
            return list(map(int, texts))
        assert time.monotonic() < deadline, texts
        time.sleep(0.01)


def assert_gone(pids):
    """None of the processes is left, at the latest after a moment."""
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if is_running(pid)]
        time.sleep(0.02)


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # a zombie has ended; its parent may be slow to notice


def test_every_line_gets_its_prefix_and_its_stream(capsys):
    program = (
        "print('one'); print('[Gloo] Rank 0 is connected to 1 peer ranks.')\n"
        "print('two', end='', flush=True)\n"
        "time.sleep(0.2); print(' halves')\n"
        "print('not a line', end='', file=sys.stderr)"
    )
    with group(program, count=2) as processes:
        assert processes.wait() is None and processes.status == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    for i in range(2):
        mine = [f"[{i}] one", f"[{i}] two halves"]
        assert [x for x in lines if x.startswith(f"[{i}]")] == mine
    assert sorted(printed.err.splitlines()) == ["[0] not a line", "[1] not a line"]


@pytest.mark.parametrize(
    "ending, status, fate",
    [
        ("sys.exit(7)", 7, "process 1 failed with status 7"),
        ("os.kill(os.getpid(), 9)", 137, "process 1 was ended by SIGKILL"),
    ],
)
def test_one_that_fails_ends_all(here, ending, status, fate):
    """Also those that ignore SIGTERM, and what they have started themselves."""
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleep)\n"
        "note(); note(f'pid-{me}-child', child.pid)\n"
        "while len(list(pathlib.Path().glob('pid-*'))) < 6: time.sleep(0.01)\n"
        "time.sleep(600) if me != 1 else None\n"
        "print('why', file=sys.stderr, flush=True)\n"
    )
    with group(program + ending) as processes:
        failed = processes.wait()
    assert (failed.status, failed.fate) == (status, fate)
    assert list(failed.last_errors) == ["why"]
    assert_gone(written(here, 6))


def test_the_first_that_fails_counts():
    """Not one that fails because of it."""
    program = (
        "gone = pathlib.Path('gone')\n"
        "if me == 2: gone.touch(); time.sleep(0.3); sys.exit(70)\n"
        "while not gone.exists(): time.sleep(0.01)\n"
        "sys.exit(75)"
    )
    with group(program, grace=5) as processes:
        assert processes.wait().status == 70


def test_what_can_be_missed_does_not_end_the_others(capsys):
    program = (
        "if me == 2: os.kill(os.getpid(), 9)\n"
        "if me == 1: sys.exit(75)\n"
        "time.sleep(0.6)\n"
        "print('to the end')\n"
    )
    with group(program, survive=True) as processes:
        assert processes.wait() is None and processes.status == 0
    printed = capsys.readouterr()
    assert printed.out == "[0] to the end\n"
    fates = {"process 1 failed with status 75", "process 2 was ended by SIGKILL"}
    assert set(printed.err.splitlines()) == fates


def test_the_first_process_can_not_be_missed():
    program = "sys.exit(75) if me == 0 else time.sleep(600)"
    with group(program, survive=True) as processes:
        failed = processes.wait()
    assert (failed.index, failed.status) == (0, 75)


def once_started(here, send):
    """Calls a function with the processes' ids as soon as all have noted theirs."""
    thread = threading.Thread(target=lambda: send(written(here, COUNT)))
    thread.start()
    return thread


@pytest.mark.parametrize(
    "number, received, status",
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 0),
        (signal.SIGHUP, signal.SIGTERM, 0),
    ],
)
def test_signals_are_passed_on(here, capsys, number, received, status):
    program = (
        "def handler(number, _):\n"
        "    print('got', number, flush=True)\n"
        "    time.sleep(0.1 * me)\n"
        "    sys.exit(130 if number == 2 else 0)\n"
        "signal.signal(signal.SIGINT, handler); signal.signal(signal.SIGTERM, handler)\n"
        "note(); time.sleep(600)"
    )
    with group(program) as processes:
        sender = once_started(here, lambda pids: os.kill(os.getpid(), number))
        assert processes.wait() is None and processes.status == status
        sender.join()
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == [
        f"[{i}] got {int(received)}" for i in range(COUNT)
    ]
    assert printed.err == "" and processes.sent == [received]


def test_the_third_signal_kills(here):
    program = "for n in (2, 15): signal.signal(n, signal.SIG_IGN)\nnote(); time.sleep(600)"

    def send_three(pids):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.15)

    with group(program) as processes:
        sender = once_started(here, send_three)
        assert processes.wait() is None
        sender.join()
    assert processes.status == 128 + signal.SIGKILL
    assert_gone(written(here, COUNT))
