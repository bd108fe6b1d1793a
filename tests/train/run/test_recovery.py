"""Going on without lost processes: threads are the processes, and nothing is trained."""

import dataclasses
import pathlib
import types

import numpy as np
import pytest
from memory_store import Service, sessions

from configs.digits import CONFIG
from train.cluster import private_jax
from train.cluster.exit_status import LOST, WRONG_USAGE
from train.config import DistributedConfig, WorkersConfig
from train.run import recovery
from train.run.result import Result


BROKEN = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")


class Ended(Exception):
    """In place of the end of a process: (its status, its last line)."""


class Killed(Exception):
    """In place of kill -9."""


class Processes:
    """Processes of a run that survives losses.

    rows: of each row of devices the processes that they belong to.
    attempts: what happens while training, time after time: {process: what it raises, or
      the processes that leave}. A process that is not named trains to its end.
    """

    def __init__(self, rows, attempts, monkeypatch):
        self.service, self.attempts = Service(), attempts
        self.opened = []  # (process, nodes, processes of the devices)
        self.rows = rows
        self._sessions = sessions(len(np.unique(rows)), self.service)
        monkeypatch.setattr(recovery.loop, "train", self._train)
        monkeypatch.setattr(recovery, "open_run", self._open)
        monkeypatch.setattr(recovery.os, "_exit", self._exit)
        monkeypatch.setattr(private_jax, "count_one_process", lambda: None)

    def _exit(self, status):
        raise Ended(status, "")

    def _leave(self, status, line):
        raise Ended(status, line)

    def _open(self, config, session, devices):
        assert config.resume and config.run_dir == "run"
        owners = [device.process_index for device in devices]
        self.opened.append((session.process_id, config.workers.nodes, owners))
        return self._run(config, session, attempt=len(self.rows) - config.workers.nodes)

    def _run(self, config, session, attempt=0):
        device = lambda process: types.SimpleNamespace(process_index=process)
        devices = np.vectorize(device, otypes=[object])(np.array(self.rows))
        mesh = types.SimpleNamespace(devices=devices)
        workers = types.SimpleNamespace(mesh=mesh, nodes=config.workers.nodes)
        return types.SimpleNamespace(
            config=config,
            session=session,
            folder=pathlib.Path("run"),
            step=7,
            attempt=attempt,
            experiment=types.SimpleNamespace(workers=workers),
            checkpoints=types.SimpleNamespace(abandon=lambda: None),
            stop_signals=types.SimpleNamespace(received=None),
        )

    def _train(self, run):
        """Trains to the end, or does what is to happen."""
        process = run.session.process_id
        happens = self.attempts[run.attempt] if run.attempt < len(self.attempts) else {}
        what = happens.get(process, [])
        if isinstance(what, Exception):
            raise what
        return Result(run.folder, run.step, 1.0, None, None, True, what)

    def of(self, process, survive=True):
        """The run of a process, and its session."""
        session = self._sessions[process]
        session.tell_where(lambda: "at step 7")
        session.heartbeat = types.SimpleNamespace(leave=self._leave)
        config = dataclasses.replace(
            CONFIG,
            workers=WorkersConfig(len(self.rows), 2),
            distributed=DistributedConfig(survive=survive),
        )
        return self._run(config, session)


def test_nodes_are_lost_and_leave_until_one_is_left(monkeypatch, capsys):
    """Process 2 is killed, then process 1 is asked to leave."""
    attempts = [{0: BROKEN, 1: BROKEN, 2: Killed()}, {0: [1], 1: [1]}]
    processes = Processes([[0, 0], [1, 1], [2, 2]], attempts, monkeypatch)
    with pytest.raises(Killed):
        recovery.train(processes.of(2))
    processes.service.dead.add(2)

    first = processes.of(0)
    assert recovery.train(first).leaving == []
    assert processes.opened == [(0, 2, [1, 1, 0, 0]), (0, 1, [0, 0])]
    assert first.session.members == [0]
    warnings = [
        "warning: process 2 (host c) was lost; the others go on",
        "warning: process 1 (host b) has left; the others go on",
    ]
    assert capsys.readouterr().err.splitlines() == warnings

    processes.opened.clear()
    assert recovery.train(processes.of(1)).leaving == [1]
    assert processes.opened == [(1, 2, [1, 1, 0, 0])]
    assert capsys.readouterr().err == ""


@pytest.fixture
def two_by_two(monkeypatch):
    """Two nodes of two processes each, of which process 3 is killed."""
    broken = dict.fromkeys(range(3), BROKEN)
    processes = Processes([[0, 1], [2, 3]], [broken], monkeypatch)
    processes.service.dead.add(3)
    return processes


def test_a_node_goes_as_a_whole(two_by_two, capsys):
    for process in (0, 1):
        assert recovery.train(two_by_two.of(process)).leaving == []
    assert two_by_two.opened == [(0, 1, [1, 0]), (1, 1, [1, 0])]
    capsys.readouterr()
    with pytest.raises(Ended) as end:
        recovery.train(two_by_two.of(2))
    assert end.value.args[0] == LOST
    assert capsys.readouterr().err == (
        "error: process 3 (host d) was lost at step 7; the nodes that are whole go on "
        "without this process\n"
    )


def test_who_is_asked_to_stop_stops_if_one_is_lost(two_by_two):
    run = two_by_two.of(0)
    run.stop_signals.received = 15
    with pytest.raises(Ended) as end:
        recovery.train(run)
    assert end.value.args == (LOST, "process 3 (host d) was lost at step 7")


def test_no_process_survives_process_0(monkeypatch):
    processes = Processes([[0, 0], [1, 1]], [{1: BROKEN}], monkeypatch)
    processes.service.dead.add(0)
    with pytest.raises(Ended) as end:
        recovery.train(processes.of(1))
    assert end.value.args == (LOST, "process 0 (host a) was lost at step 7")


def test_what_can_not_go_on_with_so_few_says_so(two_by_two, monkeypatch):
    def refuse(*_):
        raise ValueError("`topology` must be of 4 workers")

    monkeypatch.setattr(recovery, "open_run", refuse)
    with pytest.raises(Ended) as end:
        recovery.train(two_by_two.of(0))
    assert end.value.args == (WRONG_USAGE, "`topology` must be of 4 workers")


def test_those_left_who_can_not_be_connected_anew_say_so(two_by_two, monkeypatch):
    """They all live: nothing is to be learned from where it happened."""

    def fail(*_):
        raise BROKEN

    monkeypatch.setattr(recovery, "open_run", fail)
    with pytest.raises(Ended) as end:
        recovery.train(two_by_two.of(0))
    assert end.value.args == (
        LOST,
        f"could not go on with the nodes that are left ({BROKEN}) at step 7",
    )


@pytest.mark.parametrize("error", [BROKEN, ValueError("no such axis")])
def test_an_error_without_a_loss_is_an_error(error, monkeypatch):
    processes = Processes([[0, 0], [1, 1]], [{0: error}], monkeypatch)
    with pytest.raises(ValueError) as raised:
        recovery.train(processes.of(0))
    assert raised.value is error and processes.opened == []


def test_losses_are_not_survived_unless_asked_for(two_by_two):
    with pytest.raises(ValueError) as raised:
        recovery.train(two_by_two.of(0, survive=False))
    assert raised.value is BROKEN and two_by_two.opened == []


def test_fewer_than_half_of_the_nodes_do_not_go_on_by_themselves(monkeypatch):
    """A cut is not noticed of all nodes at once; after a while a loss is another one."""
    now = [0.0]
    monkeypatch.setattr(recovery.time, "monotonic", lambda: now[0])
    losses = recovery.Losses(4, seconds=30)
    assert not losses.leave_too_few(3) and not losses.leave_too_few(2)
    assert losses.leave_too_few(1)
    losses = recovery.Losses(4, seconds=30)
    for nodes in (3, 2, 1):
        now[0] += 31
        assert not losses.leave_too_few(nodes)
