"""Before the processes of a run begin."""

import dataclasses
import socket

import pytest
from memory_store import each, sessions

from configs.digits import CONFIG
from train.cluster import rendezvous
from train.config import DistributedConfig


def test_a_process_by_itself_joins_none():
    single = DistributedConfig(cluster="none")
    session = rendezvous.join(dataclasses.replace(CONFIG, distributed=single))
    assert not session.has_others and session.heartbeat is None


def test_a_port_that_is_taken_is_found_out_before_jax_does():
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        arguments = {"coordinator_address": address, "process_id": 0}
        with pytest.raises(OSError, match=f"nothing can listen at {address}: .* taken?"):
            rendezvous._check_port_is_free(arguments)
        rendezvous._check_port_is_free(arguments | {"process_id": 1})
    rendezvous._check_port_is_free(arguments)


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
