"""Before the processes of a run begin."""

import dataclasses
import os
import socket
import time

import jax
import pytest
from memory_store import each, sessions

from configs.digits import CONFIG
from train.cluster import address, rendezvous
from train.config import DistributedConfig


def test_a_process_by_itself_joins_none():
    single = DistributedConfig(cluster="none")
    session = rendezvous.join(dataclasses.replace(CONFIG, distributed=single))
    assert not session.has_others and session.heartbeat is None


def test_a_port_that_is_taken_is_found_out_before_jax_does():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = f"localhost:{taken.getsockname()[1]}"
        arguments = {"coordinator_address": given, "process_id": 0}
        with pytest.raises(OSError, match=f"nothing can listen at {given}: .* taken, by"):
            rendezvous._listening(arguments)
        assert rendezvous._listening(arguments | {"process_id": 1}) == {}
    listens = rendezvous._listening(arguments)["coordinator_bind_address"]
    assert listens.rpartition(":")[0] in ("127.0.0.1", "[::1]")


def test_process_0_listens_at_the_given_address_only(monkeypatch):
    assert address.where_to_listen("127.0.0.1:80") == "127.0.0.1:80"
    # In /etc/hosts the host's own name often stands for an address of its own only.
    monkeypatch.setattr(address, "addresses", lambda *_: ["127.0.1.1"])
    assert address.where_to_listen("node0:80") == "[::]:80"
    monkeypatch.setattr(address, "addresses", lambda *_: ["127.0.1.1", "192.0.2.1"])
    assert address.where_to_listen("node0:80") == "[::]:80"  # that one is not here
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.1:81")
    assert address.where_to_listen("127.0.0.1:80") == "10.0.0.1:81"


def test_a_host_name_that_does_not_exist_is_said_at_once():
    began = time.monotonic()
    with pytest.raises(OSError, match="host name nowhere.invalid cannot be resolved here"):
        address.check_name("nowhere.invalid:80", 300)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("progress", "seconds"), [(None, 1800), (0, 1800), (900, 2700)])
def test_a_collective_waits_for_as_long_as_a_process_may_take(
    monkeypatch, progress, seconds
):
    """To compile where others have a cache, say; that is not the heartbeats' limit."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "")
    before = jax.config.jax_enable_recoverability
    try:
        rendezvous._make_losses_survivable(progress)
    finally:
        jax.config.update("jax_enable_recoverability", before)
    flags = os.environ["XLA_FLAGS"].split()
    assert f"--xla_cpu_collective_timeout_seconds={seconds}" in flags
    assert flags[-1] == "--xla_mine=1"


def agree(configs):
    """What each process says whose configuration is the one of these."""

    def process(session):
        try:
            return rendezvous._check_agreement(session, configs[session.process_id])
        except ValueError as error:
            return str(error)

    return each(len(configs), process)


def test_processes_must_be_told_the_same():
    other = dataclasses.replace(CONFIG, seed=CONFIG.seed + 1)
    line = "`seed` must be the same in all processes, got 0 in process 0 and 1 in process 1"
    assert agree([CONFIG, other]) == [line] * 2
    assert agree([CONFIG, CONFIG, CONFIG]) == [None] * 3


def test_what_each_process_needs_for_itself_may_differ():
    mine = lambda i: dataclasses.replace(
        CONFIG,
        data=dataclasses.replace(CONFIG.data, dir=str(i)),
        distributed=DistributedConfig(process_id=i),
    )
    assert agree([mine(0), mine(1)]) == [None] * 2


def test_all_must_be_told_how_many_they_are():
    session = sessions(3)[1]
    session.hosts.pop()
    message = "must be the same for all, got 3 in process 1, but 2 came together"
    with pytest.raises(ValueError, match=message):
        rendezvous._check_agreement(session, CONFIG)
