"""train.planning.engine: paces of workers that differ, against numbers computed by hand."""

import math

import pytest

import lsgd_jax as lj
from train.planning.candidates import MethodVariant
from train.planning.engine import (
    LEAVES,
    SIZE,
    TRAINING,
    LockStep,
    TimedExchange,
    free_running,
    lock_step,
)
from train.planning.links import Link
from train.planning.scenario import ALL, Scenario
from train.planning.unequal import Unequal


EVERY, NODE = ("node", "local"), ("local",)
SLOW, LOST = Unequal(slow={0: 2.0}), Unequal(drop={1: 5.0})


@pytest.mark.parametrize(
    "exchanges, grid, unequal, step, waiting",
    [
        ([TimedExchange(0.4, 8, 0, EVERY)], (4, 1), Unequal(), 0.15, 1 / 3),
        # A step of the slow worker, and 0.4 s for eight of them: the others wait for both.
        ([TimedExchange(0.4, 8, 0, EVERY)], (4, 1), SLOW, 0.25, (3 * 0.6 + 0.2) / 4),
        # A delay hides the 50 ms of an exchange behind the slow worker's next step.
        ([TimedExchange(0.05, 8, 1, EVERY)], (4, 1), SLOW, 0.2, None),
        # LSGD exchanges every 8 steps inside a node, and every 32 among all.
        (
            [TimedExchange(0.4, 8, 0, NODE), TimedExchange(1, 32, 0, EVERY)],
            (2, 2),
            SLOW,
            9 / 32,
            None,
        ),
        # Without the lost worker a ring of three sends 4/3 and not 3/2 of the vector.
        ([TimedExchange(0.4, 8, 0, EVERY)], (4, 1), LOST, 4 / 3 * (0.1 + 0.4 / 9), None),
    ],
)
def test_lock_step(exchanges, grid, unequal, step, waiting):
    found = lock_step(exchanges, grid, 0.1, unequal)
    assert found.step == pytest.approx(step, rel=2e-3)
    assert waiting is None or found.waiting == pytest.approx(waiting)


@pytest.mark.parametrize("seconds, join", [(1.0, 4.0), (5.0, 9.0), (36.0, 9.0)])
def test_a_worker_that_fails_in_an_exchange_and_comes_back_to_it(seconds, join):
    """The others wait for it, at most for the timeout, and then all have their old pace."""
    unequal = Unequal(drop={3: 3.0}, join={3: join}, timeout=5.0)
    found = lock_step([TimedExchange(seconds, 1, 0, EVERY)], (4, 1), 0.25, unequal)
    assert found.step == pytest.approx(0.25 + seconds)
    assert found.extra > 1 and found.pause > seconds + 1


def test_a_worker_that_is_never_there_and_all_that_are_lost():
    exchanges = [TimedExchange(0.4, 8, 0, EVERY)]
    found = lock_step(exchanges, (4, 1), 0.1, Unequal(drop={3: 0.0}))
    assert found.step == pytest.approx(4 / 3 * (0.1 + 0.4 / 9))
    with pytest.raises(ValueError, match="`drop` must leave a worker that goes on"):
        lock_step(exchanges, (4, 1), 0.1, Unequal(drop=dict.fromkeys(range(4), 5.0)))


def test_a_candidate_whose_workers_differ():
    links = {ALL: Link.of(120, 2.5, 4)}
    scenario = Scenario(1e6, links, step=0.1, steps=1000, unequal=SLOW)
    found = scenario.candidate(MethodVariant("local-sgd"), (8,))
    # 400 ms of bytes and 4 latencies of 2.5 ms, every 8 steps of 200 ms.
    assert found.seconds == pytest.approx(1000 * (0.2 + 0.41 / 8))
    base = scenario.candidate(MethodVariant("allreduce"), (1,))
    assert base.seconds == pytest.approx(1000 * (0.2 + 0.41 - 0.1 * 2 / 3))


def test_the_world_of_halos_is_as_fast_as_in_its_own_simulator():
    """DiLoCo's 98 s of 32 steps: 64.7 of the slowest worker, 33.3 of the slowest link."""
    world = lj.asynchronous.WORLDS["halos"]
    found = lj.asynchronous.simulator.run(
        TRAINING,
        LockStep((TimedExchange(0.0, 32, 0, EVERY),)),
        world.nodes,
        world.locals,
        32,
        world.network.scaled(LEAVES * SIZE / world.parameters),
        world.speeds,
        timeout=math.inf,
    )
    alone = 32 * world.speeds.step * 0.907 / 0.107
    assert found.seconds == pytest.approx(alone + 33.2724, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, waits",
    [
        (lj.asynchronous.DecoupledDiLoCo(32, fragments=4), False),
        (lj.asynchronous.DiLoCo(32), True),
    ],
)
def test_asynchronous_workers_take_steps_at_the_sum_of_their_speeds(method, waits):
    network = lj.asynchronous.Network(4e6, 1e-3)
    found = free_running(method, 32, network, 1e6, (4, 1), 0.1, SLOW)
    alone = 4 / (3 / 0.1 + 1 / 0.2)
    assert alone * 0.99 < found.step < alone * (4 if waits else 1.02)
    assert (found.waiting > 0.1) is waits
