"""Sums and gathers over workers, with one that fails or is late at any point."""

import asyncio

import numpy as np
import pytest
import toys

from lsgd_jax._src.asynchronous.engine.collective import Collectives
from lsgd_jax._src.asynchronous.simulated.clock import run_virtual
from lsgd_jax._src.asynchronous.simulated.network import Network
from lsgd_jax._src.asynchronous.simulated.simulator import Simulation
from lsgd_jax.asynchronous import Pairwise, StaleWorkerError, UnreachableError


WORKERS = 4
EACH = [np.arange(600, dtype=np.float32) * 10**i for i in range(WORKERS)]
LINKS = Network(np.inf, 1.0, np.inf, 1.0)  # a message takes a second


def together(call, late=0.0, fails=None, freezes=None):
    """The result of `call(transport, i)` for each worker, or its error, and when it ended.

    late: seconds that worker 1 begins after the others.
    fails, freezes: when worker 1 fails for good, or only answers peers for 25 s.
    """

    async def conduct():
        simulation = Simulation(Pairwise(), 1, WORKERS, 1, LINKS, timeout=10.0)
        loop, found, ended = asyncio.get_running_loop(), {}, {}
        for i in range(WORKERS):
            transport = simulation.enter(toys.resting(), i).transport
            transport.collectives = Collectives(transport)  # not those of the simulator

        async def take_part(i):
            await asyncio.sleep(late if i == 1 else 0.0)
            try:
                found[i] = await call(simulation.transports[i], i)
            except (StaleWorkerError, UnreachableError) as error:
                found[i] = error
            ended[i] = loop.time()

        transports = simulation.transports
        tasks = [transports[i].start(take_part(i)) for i in range(WORKERS)]
        if fails is not None:
            loop.call_at(max(fails, 0.0), simulation.drop, 1)
        if freezes is not None:
            transport = simulation.transports[1]
            tell = transport.ask_coordinator

            async def slowly(*arguments):
                if freezes <= loop.time() < freezes + 25:
                    await asyncio.sleep(25)
                return await tell(*arguments)

            transport.ask_coordinator = slowly
        await asyncio.gather(*tasks, return_exceptions=True)
        return found, ended

    return run_virtual(conduct())


def summed(gives=lambda i: True):
    return lambda transport, i: transport.collectives.all_reduce(
        "sum", EACH[i], gives(i), range(WORKERS)
    )


def test_all_get_the_sum_of_the_workers_that_give():
    found, ended = together(summed(gives=lambda i: i != 2))
    assert len(set(ended.values())) == 1
    for i in range(WORKERS):
        total, count, came = found[i]
        assert count == 3 and came == list(range(WORKERS))
        np.testing.assert_array_equal(total, EACH[0] + EACH[1] + EACH[3])


@pytest.mark.parametrize("how", ["fails", "freezes"])
def test_if_a_worker_fails_at_any_point_all_others_agree(how):
    with_all, without = sum(EACH), EACH[0] + EACH[2] + EACH[3]
    outcomes = set()
    for point in np.arange(-0.5, 14):
        found, ended = together(summed(), **{how: point})
        rest = [found[i] for i in (0, 2, 3)]
        for total, count, came in rest:
            assert count == rest[0][1] and came == rest[0][2]
            np.testing.assert_array_equal(total, with_all if count == 4 else without)
        outcomes.add(rest[0][1])
        if how == "freezes" and 1 in found:  # it has the same, or must take over
            assert isinstance(found[1], StaleWorkerError) or found[1][1] == rest[0][1]
    assert outcomes == {3, 4}


def test_a_worker_that_comes_after_a_sum_is_stale():
    found, _ = together(summed(), late=60.0)
    assert isinstance(found[1], StaleWorkerError) and found[0][1] == 3


def test_all_gather_the_same_vectors_also_if_one_is_missing():
    call = lambda transport, i: transport.collectives.all_gather(
        "all", EACH[i], range(WORKERS)
    )
    for fails, members in ((None, [0, 1, 2, 3]), (0.5, [0, 2, 3])):
        found, _ = together(call, fails=fails)
        for i in members:
            assert sorted(found[i]) == members
            for j in members:
                np.testing.assert_array_equal(found[i][j], EACH[j])


def test_a_sum_is_computed_in_the_widest_dtype_of_its_tree():
    tree = {"a": np.float64([1 / 3]), "b": np.ones([2, 1], np.float32)}
    call = lambda transport, i: transport.collectives.all_reduce(
        "sum", tree, True, range(WORKERS)
    )
    total = together(call)[0][2][0]
    assert total["a"] == 4 * tree["a"] and total["b"].dtype == np.float32
