"""Which of several processes are taken to be lost, and what the others say then."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from memory_store import Service, sessions

from train.cluster.exit_status import CRASHED, INTERRUPTED, LOST
from train.cluster.heartbeat import DONE, Heartbeat
from train.cluster.lost import Lost


class Ended(Exception):
    """In place of the end of a process."""


class Ending:
    """Notes how the process would have ended."""

    on_abort = None

    def __init__(self):
        self.ends = []

    def end(self, status, line):
        self.ends.append((status, line))
        raise Ended


class Process:
    """One of several, with what it needs to watch over the others."""

    def __init__(self, session, timeout=30.0, survive=False):
        self.session, self.ending = session, Ending()
        self.heartbeat = Heartbeat(session, self.ending, timeout, survive)

    def has_seen(self, **ago):
        """Notes when the processes' heartbeats have last changed, in seconds."""
        for name, (text, seconds) in ago.items():
            changed = self.heartbeat._looked - seconds
            self.heartbeat._seen[int(name[1:])] = text, changed

    def watch(self):
        """Gives heartbeats and looks for the others' until the process would end."""
        with contextlib.suppress(Ended):
            self.heartbeat._watch()

    def look(self):
        """Gives one heartbeat and looks for the others'."""
        self.heartbeat._done.set()
        with contextlib.suppress(Ended):
            self.heartbeat._watch()


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def four(service):
    """Four processes that look ten times a second."""
    return [Process(session, timeout=0.3) for session in sessions(4, service)]


@pytest.fixture
def process(service):
    """Process 1 of four, which has looked just now."""
    return Process(sessions(4, service)[1])


def lost(process):
    return process.heartbeat._lost()


def test_whose_heartbeat_is_old_is_lost(process):
    process.has_seen(p0=("7", 0.5), p1=("7", 20.0), p2=("9", 11.0), p3=("8", 12.0))
    assert lost(process) == [2, 3]


def test_who_is_done_is_not_lost(process):
    process.has_seen(p0=("7", 0.5), p2=(DONE, 100.0), p3=("8", 12.0))
    assert lost(process) == [3]


def test_whom_the_run_goes_on_without_is_not_lost_again(process):
    process.session.go_on_without([2])
    process.has_seen(p0=("7", 0.5), p2=("9", 100.0), p3=("8", 12.0))
    assert lost(process) == [3]


def test_process_0_is_lost_if_nothing_listens_there(process, service):
    process.has_seen(p0=("7", 0.5), p2=("8", 0.5))
    assert lost(process) == []
    service.is_there = False
    assert lost(process) == [0]


def test_process_0_is_lost_if_the_service_has_long_been_silent(process):
    process.has_seen(p0=("7", 0.5), p2=("8", 0.5))
    process.heartbeat._looked -= 11
    assert lost(process) == [0]


def test_a_session_learns_of_a_loss_that_is_to_be_survived(service):
    first, second = (Process(x, 0.3, survive=True) for x in sessions(2, service))
    second.look()
    first.look()
    first.session.check_no_member_is_lost()
    first.has_seen(p1=("0", 1.0))
    first.look()
    with pytest.raises(Lost, match="lost: process 1"):
        first.session.check_no_member_is_lost()


def test_an_error_because_another_one_is_lost_names_it(four, capsys):
    """Also if it comes as a ValueError, as XLA's sometimes do."""
    process = four[1]
    process.has_seen(p0=("7", 0.0), p2=("9", 1.0), p3=("8", 0.0))
    error = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    with pytest.raises(Ended):
        process.heartbeat._crashed(ValueError, error, None)
    line = "error: process 2 (host c) was lost before training began"
    assert process.ending.ends == [(LOST, line)] and capsys.readouterr().err == ""


def test_who_is_ended_by_jax_names_the_lost_ones(four):
    process = four[1]
    process.session.tell_where(lambda: "at step 7")
    process.has_seen(p0=("7", 0.0), p2=("9", 1.0), p3=("8", 1.0))
    names = "process 2 (host c) and process 3 (host d)"
    assert process.ending.on_abort() == f"{names} were lost at step 7"
    process.heartbeat._seen.clear()
    process.heartbeat._looked = time.monotonic()
    line = "jax has ended this process, see above, at step 7"
    assert process.ending.on_abort() == line


def test_a_crash_ends_all_and_says_why(four, capsys):
    crashed, other, *_ = four[1], four[3]
    other.session.tell_where(lambda: "at step 7")
    with pytest.raises(Ended):
        crashed.heartbeat._crashed(ValueError, ValueError("no such axis"), None)
    line = "error: this process crashed before training began (ValueError: no such axis)"
    assert crashed.ending.ends == [(CRASHED, line)]
    assert capsys.readouterr().err == "ValueError: no such axis\n"
    other.look()
    line = "error: process 1 (host b) crashed at step 7 (ValueError: no such axis)"
    assert other.ending.ends == [(LOST, line)]


def test_who_leaves_takes_the_others_along(four):
    with pytest.raises(Ended):
        four[0].heartbeat.leave(2, "no such data")
    four[1].look()
    assert four[0].ending.ends == [(2, "error: no such data")]
    assert four[1].ending.ends == [(2, "error: process 0 (host a): no such data")]


def test_a_second_ctrl_c_is_no_crash(four):
    with pytest.raises(Ended):
        four[2].heartbeat._crashed(KeyboardInterrupt, KeyboardInterrupt(), None)
    line = "interrupted before training began"
    assert four[2].ending.ends == [(INTERRUPTED, line)]


def test_a_main_thread_that_does_not_learn_of_a_loss_is_freed(process, monkeypatch):
    """From others at once, then from devices of its own; not while it asks who is lost."""
    now, freed = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        process.session.connections, "let_go", lambda all: freed.append((now[0], all))
    )
    for now[0] in (100.0, 114.0, 116.0, 131.0):
        process.heartbeat._give_up()
    assert freed == [(116.0, False), (131.0, True)]
    assert process.session.lost_members() == set()
    process.heartbeat._give_up()
    assert len(freed) == 2


@pytest.mark.parametrize("survive", [False, True])
def test_one_that_hangs_is_named_and_ends(service, survive):
    """Its heartbeats go on. Where losses are survived the others stay."""
    three = [Process(x, 1.0, survive) for x in sessions(3, service)]
    for process in three:
        process.heartbeat._progress_timeout = 1
        process.session.work.begin("at step 7")
    for i in (0, 2):
        three[i].session.work.begin("after step 7")
    with ThreadPoolExecutor(3) as pool:
        for process in three:
            pool.submit(process.watch)
        time.sleep(1.7)
        for process in three:
            process.heartbeat._done.set()
    line = "process 1 (host b), pid "
    ((status, last),) = three[1].ending.ends
    assert status == LOST and line in last and "at step 7, has made no progress" in last
    for i in (0, 2):
        ends = three[i].ending.ends
        assert not ends if survive else ends[0][0] == LOST and line in ends[0][1]
