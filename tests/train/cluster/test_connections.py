"""Devices of one process that wait for one another after a loss are freed."""

import contextlib
import socket
import sys
import types

import jax
import numpy as np
import pytest
from memory_store import sessions

import lsgd_jax as lj
from train.cluster import connections
from train.cluster.connections import Connections, part


def test_the_devices_of_a_process_keep_their_places_in_the_grid():
    grid = lambda rows: np.vectorize(
        lambda process: types.SimpleNamespace(process_index=process), otypes=[object]
    )(np.array(rows))
    owners = lambda devices: [[device.process_index for device in row] for row in devices]
    assert owners(part(grid([[0, 0], [1, 1], [1, 1]]), 1)) == [[1, 1], [1, 1]]
    assert owners(part(grid([[1, 1, 0, 0]]), 0)) == [[0, 0]]
    assert part(grid([[0, 0, 1], [1, 2, 2]]), 1).shape == (2,)


@pytest.fixture
def own(monkeypatch):
    """Those of a process that survives losses; its connections are `Pair`s, to and fro."""
    first, _ = sessions(2)
    monkeypatch.setattr(first, "wait_for_all", lambda: None)
    first.connections.survive = True
    return first.connections


@contextlib.contextmanager
def connected():
    """The two ends of a connection inside this process."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as there,
        server.accept()[0] as here,
    ):
        here.settimeout(10)
        yield here, there


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux lists them")
def test_a_device_that_waits_for_one_of_its_process_is_freed(own, monkeypatch):
    """That in a group with others at once, that in a group of its own if it is stuck."""
    monkeypatch.setattr(connections, "STUCK_S", 0.01)
    with contextlib.ExitStack() as stack:
        made = []

        def connect(mesh):
            return lambda: made.append(stack.enter_context(connected()))

        monkeypatch.setattr(connections, "_meeting", connect)
        workers = lj.Workers(1, 2)
        own.make(workers)
        (kept, to_kept), (spanning, _) = made

        own.let_go()
        assert spanning.recv(1) == b""
        to_kept.sendall(b"x")
        assert kept.recv(1) == b"x"

        monkeypatch.setattr(connections, "_meeting", lambda mesh: lambda: kept.recv(1))
        own.make(workers)
        own.let_go()
        assert to_kept.recv(1) == b""


def test_devices_meet_in_all_their_groups(own):
    workers = lj.Workers(2, 2)
    own.make(workers)
    total = connections._meeting(workers.mesh)()
    # 0 + 1 + 2 + 3 are 6; each of a node adds its place there to it, and so on.
    assert isinstance(total, jax.Array) and int(total) == 2 * (2 * 6 + 1) + 1
    assert Connections(sessions(1)[0]).make(workers) is None
