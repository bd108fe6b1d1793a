"""The processes of a run; here threads, whose texts go through a list in memory."""

import dataclasses
import signal
import socket
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from harness import mostly_slow

from configs.cifar10_cnn7 import CONFIG as CIFAR10
from configs.digits import CONFIG
from train import compare, plan
from train.cluster import rendezvous, session, shared_folder, signals
from train.cluster.session import Session
from train.cluster.signals import StopSignals, StopTogether
from train.config import DistributedConfig
from train.process import numerics
from train.process.exit_status import CRASHED, RESUME, WRONG_USAGE


class Thread(Session):
    """A session that exchanges messages with the sessions of other threads."""

    def __init__(self, process_id, hosts, texts, barrier):
        super().__init__(process_id, hosts)
        self._texts, self._barrier = texts, barrier

    def gather(self, text):
        self._texts[self.process_id] = text
        self._barrier.wait(30)
        gathered = list(self._texts)
        self._barrier.wait(30)
        return gathered


def each(count, function):
    """Calls a function in each of `count` processes. Returns their results."""
    texts, barrier = [""] * count, threading.Barrier(count)
    hosts = [chr(ord("a") + i) for i in range(count)]
    sessions = [Thread(i, hosts, texts, barrier) for i in range(count)]

    def call(own):
        try:
            return function(own)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, sessions))


# Messages


def test_all_processes_agree_with_the_main_one():
    assert each(3, lambda own: own.agree(str(own.process_id))) == ["0"] * 3
    assert each(3, lambda own: own.is_main) == [True, False, False]


def test_all_processes_detect_a_difference():
    assert each(3, lambda own: own.same_everywhere("a")) == [True] * 3
    differ = lambda own: own.same_everywhere("b" if own.process_id == 1 else "a")
    assert each(3, differ) == [False] * 3


def test_an_error_of_the_main_process_is_raised_by_all():
    fail = Mock(side_effect=ValueError("no room"))
    assert each(2, lambda own: own.of_main(fail)) == ["no room"] * 2
    assert each(2, lambda own: own.of_main(lambda: "made")) == ["made"] * 2


def test_a_process_that_is_alone_reports_and_returns(capsys):
    own = Session()
    own.wait_for_all()
    assert own.leave(2, "no such data") == 2
    assert own.leave(130, "interrupted") == 130
    assert capsys.readouterr().err == "error: no such data\ninterrupted\n"
    with pytest.raises(ZeroDivisionError), own.ended_by_errors():
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            ValueError("UNKNOWN: Gloo failed"),
            RESUME,
            "another process was lost at step 3 (",
        ),
        (ZeroDivisionError("x"), CRASHED, "this process crashed at step 3 (ZeroDivision"),
    ],
)
def test_one_of_several_processes_exits_at_once(monkeypatch, capsys, error, status, line):
    """A regular exit would wait for the others."""
    monkeypatch.setattr(session, "LAST_LINES_S", 0.0)
    monkeypatch.setattr(session.os, "_exit", lambda number: ended.append(number))
    own, ended = Session(0, ["a", "b"]), []
    own.where = lambda: "at step 3"
    with own.ended_by_errors():
        raise error
    assert ended[0] == status
    assert f"error: {line}" in capsys.readouterr().err


ENDS = [
    (ValueError("UNKNOWN: Gloo failed"), RESUME, "error: another process was lost "),
    (ValueError("`x` must be 1"), WRONG_USAGE, "error: `x` must be 1\n"),
    (ZeroDivisionError("x"), CRASHED, "error: this process crashed "),
]
COMPARES = [(compare, "open_run", *end) for end in ENDS]
PLANS = [(plan, "measure", *end) for end in ENDS]


# By default every end of the shorter command.
@pytest.mark.parametrize(
    "command, works, error, status, line",
    mostly_slow(COMPARES + PLANS, fast=[COMPARES[0], *PLANS]),
)
def test_a_command_ends_the_others_as_a_run_does(
    command, works, error, status, line, one_of_two, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(command, works, Mock(side_effect=error))
    more = ["--methods=lsgd", f"--out={tmp_path}"] if command is compare else []
    with pytest.raises(SystemExit) as ended:
        command.main(["digits", *more])
    assert ended.value.code == status
    assert capsys.readouterr().err.splitlines(True)[-1].startswith(line)


# Agreement


MAY_DIFFER = {
    "data": dataclasses.replace(CIFAR10.data, dir="x"),
    "distributed": DistributedConfig(process_id=1),
}
SAME = "must be the same in all processes, got"


@pytest.mark.parametrize(
    ("other", "count", "message"),
    [
        (MAY_DIFFER, 2, None),
        ({"seed": 1}, 2, f"`seed` {SAME} 0 in process 0 and 1 in process 1"),
        ({}, 3, f"`distributed.num_processes` {SAME} 2 in process 0 and 3 in process 1"),
    ],
)
def test_processes_must_have_the_same_settings(other, count, message):
    given = (CIFAR10, 2), (dataclasses.replace(CIFAR10, **other), count)
    check = lambda own: rendezvous._check_agreement(own, *given[own.process_id])
    said = each(2, check)
    assert said == [None] * 2 if message is None else all(message in x for x in said)


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [
        (rendezvous, "sources", "train/run/cli.py"),
        (numerics, "versions", "optax"),
        (numerics, "jax_settings", "jax_threefry_partitionable"),
    ],
)
def test_processes_must_have_the_same_software(monkeypatch, module, function, name):
    found = iter("ab")
    monkeypatch.setattr(module, function, lambda: {name: next(found)})
    for said in each(2, lambda own: rendezvous._check_agreement(own, CONFIG, 2)):
        assert f"`{name}` {SAME}" in said


def test_a_wrong_or_taken_address_is_detected_before_jax_uses_it():
    arguments = {"coordinator_address": "nowhere.invalid:80", "process_id": 0}
    with pytest.raises(OSError, match="host name nowhere.invalid cannot be resolved here"):
        rendezvous._check_address(arguments)
    with rendezvous.socket.create_server(("", 0)) as taken:
        given = f"localhost:{taken.getsockname()[1]}"
        arguments = {"coordinator_address": given, "process_id": 0}
        with pytest.raises(OSError, match=f"nothing can listen at {given}: .* taken by"):
            rendezvous._check_address(arguments)
        rendezvous._check_address(arguments | {"process_id": 1})


@pytest.mark.parametrize(
    ("addresses", "is_reached", "message"),
    [
        ([], False, "run here), got here (Name or service not known); jax"),
        (["203.0.113.5"], False, "got here (203.0.113.5 is not an address of this host)"),
        (["203.0.113.5", "127.0.1.1"], False, None),
        (["127.0.1.1"], True, "that other hosts can reach, got here (127.0.1.1); jax"),
        (["0.0.0.0"], True, None),
    ],
)
def test_the_name_of_the_host_must_resolve_to_an_address_for_gloo(
    monkeypatch, addresses, is_reached, message
):
    def resolve(name, port, type):
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 6, "", (x, port)) for x in addresses]

    monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", resolve)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    rendezvous._check_own_name(is_reached)  # gloo is not used
    monkeypatch.delenv("JAX_PLATFORMS")
    (said,) = each(1, lambda own: rendezvous._check_own_name(is_reached))
    if message is None:
        assert said is None
    else:
        assert said.startswith("the name of this host must resolve to ") and message in said


@pytest.mark.parametrize(
    ("slices", "coordinator", "others"),
    [
        ([0, 0], "0.0.0.0", False),
        ([0, 1], "0.0.0.0", True),
        ([0, 1], "127.0.0.1", False),
        ([0, 0], "203.0.113.5", True),  # of a container, whose devices tell its machine
    ],
)
def test_cpus_of_several_hosts_are_detected(monkeypatch, slices, coordinator, others):
    devices = [types.SimpleNamespace(slice_index=i) for i in slices]
    monkeypatch.setattr(rendezvous.jax, "devices", lambda: devices)
    arguments = {"coordinator_address": f"{coordinator}:1"}
    assert rendezvous._has_other_hosts(arguments) is others


# The run folder


@pytest.mark.parametrize("other", ["shared", "own", "missing"])
def test_all_processes_must_see_the_run_folder(tmp_path, monkeypatch, other):
    monkeypatch.setattr(shared_folder, "PATIENCE_S", 0.2)
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    folders = [tmp_path / "shared", tmp_path / other, tmp_path / "shared"]
    said = each(3, lambda own: shared_folder.check(own, folders[own.process_id]))
    if other == "shared":
        assert said == [None] * 3
    else:
        words = "of process 0 (host a), but process 1 (host b) cannot: name one"
        assert all(words in line for line in said)
    assert list((tmp_path / "shared").iterdir()) == []


# Signals


@pytest.mark.parametrize(
    ("asked", "received"),
    [
        ({1: signal.SIGTERM}, signal.SIGTERM),
        ({0: signal.SIGTERM, 1: signal.SIGINT}, signal.SIGINT),
        ({1: signal.SIGHUP}, signal.SIGTERM),
        ({0: signal.SIGUSR1}, signal.SIGTERM),
    ],
)
def test_all_stop_at_the_step_of_jax_for_the_same_reason(monkeypatch, asked, received):
    """Only the main thread may set handlers, so signals are recorded by hand."""
    passed_on = []
    monkeypatch.setattr(signals.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(signals.os, "kill", lambda pid, number: passed_on.append(number))
    monkeypatch.setattr(
        signals.multihost_utils, "reached_preemption_sync_point", lambda step: step == 5
    )

    def train(own):
        with StopSignals(own) as stop:
            if own.process_id in asked:
                stop._note(asked[own.process_id], None)
            steps = [step for step in range(1, 9) if stop.asked()]
            return steps, stop.received

    assert each(2, train) == [([5, 6, 7, 8], received)] * 2
    assert passed_on == [signal.SIGTERM] * len(asked)


def test_ctrl_c_after_that_of_the_others_is_the_first_one_of_a_process(monkeypatch):
    monkeypatch.setattr(signals.os, "kill", lambda pid, number: None)
    stop = StopSignals(Session(1, ["a", "b"]))
    stop.received = signal.SIGINT  # as all agreed
    stop._note(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        stop._note(signal.SIGINT, None)


# Processes that may be lost


def stop_together(patience, monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE_S", patience)
    crew = types.SimpleNamespace(stopped="", stop_all=Mock())
    return StopTogether(crew), crew


def test_a_process_that_is_asked_tells_the_others_and_waits_for_them(monkeypatch):
    stop, crew = stop_together(60, monkeypatch)
    assert not stop.asked()
    stop.received = signal.SIGINT
    assert not stop.asked() and not stop.asked()
    crew.stop_all.assert_called_once_with("SIGINT")
    crew.stopped = "SIGINT"
    assert stop.asked() and stop.received == signal.SIGINT


def test_a_process_that_is_not_asked_stops_with_the_others(monkeypatch):
    stop, crew = stop_together(60, monkeypatch)
    crew.stopped = "SIGTERM"
    assert stop.asked() and stop.received == signal.SIGTERM
    crew.stop_all.assert_not_called()


def test_a_process_whose_patience_ends_leaves_alone(monkeypatch):
    stop, _ = stop_together(-1, monkeypatch)
    assert not stop.asked()
    stop.received = signal.SIGTERM
    assert stop.asked() and stop.received == signal.SIGTERM
