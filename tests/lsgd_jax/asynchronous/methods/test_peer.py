"""Two calls around a loop: by hand in one process, and programs on Ray that come and go."""

import concurrent.futures
import os
import subprocess
import sys
import textwrap
import time
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
import ray
from outside import until

import lsgd_jax as lj
from lsgd_jax._src.asynchronous.engine.contents import buffered, on_host
from lsgd_jax._src.asynchronous.engine.mailbox import Mailbox
from lsgd_jax._src.asynchronous.ray.join import JoinedTransport
from lsgd_jax.asynchronous import (
    ADPSGD,
    WAGMA,
    GridPosition,
    Pairwise,
    Peer,
    Transport,
    UnreachableError,
)


class Nearby(Transport):
    """Peers of one process, whose answers arrive before the next call."""

    def __init__(self, rank, mailboxes, wire):
        self.position, self.timeout = GridPosition(rank, 1, 2), 1.0
        self.mailbox = mailboxes[rank] = Mailbox(wire, rank)
        self._mailboxes = mailboxes

    def now(self):
        return 0.0

    async def ask_peer(self, peer, call, *arguments):
        if peer not in self._mailboxes:
            raise UnreachableError
        return getattr(self._mailboxes[peer], call)(*arguments)

    async def step(self, compute):
        raise AssertionError("the program takes the steps")

    async def ask_coordinator(self, call, *arguments):
        raise AssertionError("there is no coordinator")


@pytest.fixture
def pair():
    """Two peers of one method."""
    made = []

    def make(method):
        mailboxes = {}
        for rank in range(2):
            transport = Nearby(rank, mailboxes, method.wire)
            made.append(Peer(method, transport, lambda rank=rank: mailboxes.pop(rank)))
        return made

    yield make
    for peer in made:
        peer.leave()


def place(x):
    return {"w": jnp.full(3, x), "n": jnp.int32(7)}


@pytest.mark.slow
def test_what_arrives_during_a_step_is_mixed_in_after_it(pair):
    a, b = pair(Pairwise(value=0.25))
    a.send(place(0.0), 1.0)
    b.send(place(4.0), 1.0)
    assert a.receive()["w"].tolist() == [0, 0, 0]  # only asks
    b.send(place(8.0), 1.0)
    a.send(place(2.0), 1.0)
    mixed = a.receive()
    assert mixed["w"].tolist() == [0.25 * 4 + 0.75 * 2] * 3 and mixed["n"] == 7
    a.send(mixed, 1.0)
    assert a.receive()["w"].tolist() == [0.25 * 8 + 0.75 * 2.5] * 3


def test_the_weight_follows_the_losses_and_the_clocks(pair):
    a, b = pair(Pairwise("loss"))
    a.send(place(0.0), 3.0)
    b.send(place(4.0), jnp.float32(1.0))
    a.receive()
    a.send(place(0.0), 3.0)
    assert a.receive()["w"].tolist() == [3.0] * 3  # 3 / (3 + 1) of 4
    # A loss that is not finite: the peer's parameters are taken whole.
    a.send(place(9.0), np.nan)
    assert a.receive()["w"].tolist() == [4.0] * 3


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_a_pair_of_adpsgd_meets_half_way_and_keeps_its_steps(pair, wire):
    a, b = pair(ADPSGD(wire=wire))
    a.send(place(0.0), 1.0)
    b.send(place(4.0), 1.0)
    assert a.receive()["w"].tolist() == [0, 0, 0]  # only asks
    assert b.receive()["w"].tolist() == [2, 2, 2]  # moved by its peer
    a.send(place(1.0), 1.0)  # a step of 1 meanwhile
    moved = a.receive()
    assert moved["w"].tolist() == [3, 3, 3] and moved["n"] == 7
    # A loss that is not finite: the passive worker takes the active one's parameters.
    b.send(place(9.0), np.nan)
    b.receive()
    b.send(place(9.0), np.nan)
    assert b.receive()["w"].tolist() == [1, 1, 1]


def test_a_peer_that_has_left_does_not_stop_the_other_one(pair):
    a, b = pair(Pairwise())
    b.send(place(4.0), 1.0)
    a.send(place(0.0), 1.0)
    a.receive()
    b.leave()
    b.leave()
    with pytest.raises(RuntimeError, match="has left"):
        b.send(place(0.0), 1.0)
    found = []
    for _ in range(6):
        a.send(place(0.0), 1.0)
        found.append(a.receive()["w"][0].item())
    assert found == [2, 0, 0, 0, 0, 0]  # what had arrived before, and nothing more


def test_a_program_whose_own_mailbox_hangs_or_dies_goes_on():
    late = concurrent.futures.Future()
    dead = concurrent.futures.Future()
    actor = Mock()
    actor.moved.remote.return_value.future.side_effect = [late, dead]
    transport = JoinedTransport(
        actor,
        run="run",
        position=GridPosition(1, 1, 2),
        timeout=0.05,
        mailbox=Mailbox("float32", 1),
        begun=time.time(),
    )
    with Peer(ADPSGD(), transport, lambda: None) as peer:

        def moved():
            peer.send(place(1.0), 1.0)
            return peer.receive()["w"].tolist()

        assert moved() == [1, 1, 1] and moved() == [1, 1, 1]  # waits for the timeout only
        by = on_host({**place(0.0), "w": jnp.float32([1, 2, 3])})
        late.set_result(buffered(by))
        assert moved() == [2, 3, 4] and actor.moved.remote.call_count == 1
        dead.set_exception(ray.exceptions.ActorDiedError())
        assert moved() == [1, 1, 1] and actor.moved.remote.call_count == 2


def test_wrong_use_is_refused(pair):
    a, b = pair(Pairwise())
    with pytest.raises(RuntimeError, match="`send` must be called before `receive`"):
        a.receive()
    a.send(place(0.0), 1.0)
    b.send({**place(0.0), "w": jnp.zeros(4)}, 1.0)
    a.receive()
    with pytest.raises(ValueError, match=r"got \(4,\) for \(3,\) at"):
        a.receive()
    for options, message in {
        (WAGMA(), 0, 2): "`method` must be a `Pairwise` or an `ADPSGD`",
        (Pairwise(), 2, 2): r"`rank` must be in 0\.\.1, got rank=2",
        (Pairwise(), 0, 0): "`num_workers` must be a positive int",
    }.items():
        method, rank, num_workers = options
        with pytest.raises(ValueError, match=message):
            lj.asynchronous.join(method, "run", rank, num_workers)


# Each program is drawn to a place of its own, and prints how often it was moved by a peer.
PROGRAM = textwrap.dedent(
    """
    import os, sys, time
    import jax.numpy as jnp, lsgd_jax as lj

    name, address, stop, *numbers = sys.argv[1:]
    rank, crash, steps = map(int, numbers)
    x, t, moved = jnp.zeros(3), 0, 0
    method = getattr(lj.asynchronous, name)(seed=1)
    with lj.asynchronous.join(method, "run", rank, 3, address=address, timeout=20) as peer:
        while t < steps and not os.path.exists(stop):
            x, t = x + 0.2 * (rank - x), t + 1
            peer.send({"x": x}, float((x[0] - rank) ** 2))
            if t == crash:
                os._exit(3)
            y = peer.receive()["x"]
            x, moved = y, moved + bool((y != x).any())
            time.sleep(0.05)
    print(moved)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Pairwise", "ADPSGD"])
def test_programs_on_ray_come_crash_and_come_back(on_ray, tmp_path, method):
    address, stop = ray.get_runtime_context().gcs_address, tmp_path / "stop"
    # The cluster listens on 127.0.0.1 only, which Ray would replace by another address.
    env = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

    def begin(rank, crash=0, steps=10**6):
        given = [method, address, stop, rank, crash, steps]
        command = [sys.executable, "-c", PROGRAM, *map(str, given)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    first, crashing, third = programs = [begin(0), begin(1, crash=20), begin(2)]
    try:
        assert crashing.wait(100) == 3
        back = begin(1, steps=200)  # under the same rank
        programs.append(back)
        assert int(back.communicate(timeout=100)[0]) > 5 and back.returncode == 0
        stop.touch()
        for program in (first, third):
            assert int(program.communicate(timeout=60)[0]) > 20
            assert program.returncode == 0
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    left = lambda: [x["namespace"] for x in ray.util.list_named_actors(True)]
    until(lambda: "lsgd" not in left())
