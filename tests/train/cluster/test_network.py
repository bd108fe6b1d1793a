"""Connections to a process that is lost are cut; here both ends are in this process."""

import contextlib
import socket
import sys

import pytest

from train.cluster import network


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as Linux lists them")


def test_only_the_connections_of_the_lost_process_are_cut():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pairs = []
        for _ in range(2):
            there = stack.enter_context(socket.create_connection(server.getsockname()))
            pairs.append((stack.enter_context(server.accept()[0]), there))
        name = lambda end: "{}:{}".format(*end)
        (here, there), (kept, other) = pairs
        theirs = [name(there.getsockname()), name(there.getpeername())]
        assert theirs in network.connections()
        assert theirs not in network.connections(except_port=server.getsockname()[1])
        network.cut([theirs])
        here.settimeout(10)
        assert here.recv(1) == b""  # whoever waits for it learns of it at once
        other.sendall(b"x")
        assert kept.recv(1) == b"x"
