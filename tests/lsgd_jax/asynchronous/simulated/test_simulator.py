"""The simulator: the numbers of the methods, the times of the network, faults, seeds."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import clock, noting, slow, stacked

import lsgd_jax as lj
from lsgd_jax._src.asynchronous.engine.worker import Training
from lsgd_jax._src.asynchronous.simulated.clock import run_virtual
from lsgd_jax._src.asynchronous.simulated.network import Links, Network
from lsgd_jax._src.asynchronous.simulated.speeds import Speeds
from lsgd_jax.asynchronous import simulator


SIZE = 4000
FAST = Network(bandwidth=1e9, latency=1e-6)
NETWORK = Network(bandwidth=1e6, latency=1e-3, inside_bandwidth=4e6, inside_latency=1e-4)


def init(i):
    return {"w": jnp.zeros(SIZE)}, (), jnp.float32(i)


@jax.jit
def step(params, opt_state, own, t):
    target = jnp.arange(SIZE) / SIZE + 0.1 * own
    error = params["w"] - target - 0.01 * t
    return {"w": -0.2 * error}, opt_state, own, jnp.mean(error**2)


TRAINING = Training(init, step)
LSGD = lj.asynchronous.Pulls(lj.lsgd(0.3, 0.2, 2, 4))
BUDGET = lj.asynchronous.Pulls(lj.lsgd(0.3, 0.2, 2, 4), budget=True)
MEANS = lj.asynchronous.Pulls(lj.local_sgd(2))


def simulate(method=LSGD, nodes=2, locals=2, steps=8, network=NETWORK, **options):
    return simulator.run(TRAINING, method, nodes, locals, steps, network, **options)


@pytest.mark.slow
@pytest.mark.parametrize("method, collectives", [(LSGD, True), (BUDGET, False)])
def test_the_network_changes_no_numbers(method, collectives):
    """`test_pulls` compares those of a free network with lock step."""
    free = simulator.run(TRAINING, method, 2, 2, 8)
    found = simulate(method, network=FAST, collectives=collectives)
    np.testing.assert_array_equal(stacked(found.workers), stacked(free.workers))
    assert found.sent.sum() > 0 and free.seconds == pytest.approx(8 * 0.01)


def test_it_runs_where_a_loop_is_running_as_in_a_notebook():
    async def cell():
        return simulate(steps=2).seconds

    assert asyncio.run(cell()) == simulate(steps=2).seconds


def test_workers_that_wait_for_each_other_for_ever_end_the_run():
    class Waiting(type(LSGD)):
        def bind(self, worker, steps):
            bound = super().bind(worker, steps)
            bound.after_step = lambda: asyncio.get_running_loop().create_future()
            return bound

    with pytest.raises(RuntimeError, match="all workers wait for each other"):
        simulate(Waiting(lj.local_sgd(2)), steps=2)


def test_the_others_wait_once_for_a_worker_that_hangs():
    found = simulate(MEANS, steps=20, timeout=0.5, hangs={1: 0.05})
    counts = [worker.count for worker in found.workers]
    assert counts[1] < 10 and counts[0] == counts[2] == counts[3] == 20
    assert max(worker.report.longest for worker in found.workers) < 0.6


def test_runs_with_one_seed_are_bit_identical():
    speeds = Speeds(0.01, jitter=0.3, lognormal=0.2, stall_probability=0.1, stall=0.1)

    def run(seed):
        seen = []
        observe = lambda w: seen.append((w.transport.now(), w.index, w.count, w.loss))
        found = simulate(
            BUDGET, speeds=speeds, seed=seed, loss=0.01, timeout=1, observe=observe
        )
        return stacked(found.workers).tobytes(), found.seconds, seen

    assert run(seed=1) == run(seed=1)
    assert run(seed=1)[1] != run(seed=2)[1]


# Times


def transfers(*messages, stuck=None, limit=np.inf, network=NETWORK, start=0.0, sent=()):
    """When each message (begin, source, target, size) arrives; None if it does not.

    start: seconds of the clock at time 0 of the messages.
    sent: is compared with the bytes that have left each node.
    """

    async def send(links, begin, source, target, size):
        await asyncio.sleep(begin)
        arrived = await links.send(source, target, size, limit)
        return asyncio.get_running_loop().time() - start if arrived else None

    async def conduct():
        links = Links(network, nodes=2, locals=2)
        links.stuck |= {stuck} - {None}
        await asyncio.sleep(start)
        times = await asyncio.gather(*(send(links, *message) for message in messages))
        if sent:
            assert links.sent.tolist() == list(sent)
        return times

    return run_virtual(conduct())


def test_a_message_takes_the_latency_and_its_bytes():
    assert transfers((0, 0, 2, 1e6)) == pytest.approx([1.001])
    assert transfers((0, 0, 1, 1e6)) == pytest.approx([0.2501])
    assert transfers((0, 0, 2, 1000)) == pytest.approx([0.002])
    # Whatever its size, it counts where it leaves a node.
    both = transfers((0, 0, 2, 1e6), (0, 1, 2, 100), (0, 0, 1, 1e6), sent=(1e6 + 100, 0))
    assert both == pytest.approx([1.001, 0.0011, 0.2501])
    # Software takes time around what is large.
    busy = Network(1e6, 1e-3, overhead=0.01)
    both = transfers((0, 0, 2, 1e6), (2, 0, 2, 1000), network=busy)
    assert both == pytest.approx([1.011, 2.002])


def test_a_link_is_shared_by_what_it_carries_at_a_time():
    # Out of node 0 half the speed for both until the short one has arrived.
    assert transfers((0, 0, 2, 1e6), (0, 1, 3, 0.5e6)) == pytest.approx([1.501, 1.001])
    # Into node 1 and out of it are two links.
    assert transfers((0, 0, 2, 1e6), (0, 2, 0, 1e6)) == pytest.approx([1.001, 1.001])
    # The later one finds the link half taken.
    assert transfers((0, 0, 2, 1e6), (0.5, 1, 2, 0.5e6)) == pytest.approx([1.501, 1.501])
    # Inside a node each worker has links of its own.
    assert transfers((0, 0, 1, 1e6), (0, 1, 0, 1e6)) == pytest.approx([0.2501, 0.2501])


def test_a_late_message_is_given_up_and_leaves_the_link():
    late, other = transfers((0, 0, 2, 1e6), (0, 1, 3, 0.2e6), limit=0.5)
    assert late is None and other == pytest.approx(0.401)
    assert transfers((0, 0, 2, 1e6), limit=2, stuck=2) == [None]


@pytest.mark.parametrize("start", [2.0**24, 2.0**24 + 1 / 3, 1e9])
def test_a_long_run_goes_on(start):
    """A rounding of its clock, at last 10^-7 s, is longer than 10^-9 s."""
    found = transfers((0, 0, 2, 1000), (0, 0, 2, 1e6), (0, 1, 3, 0.5e6), start=start)
    assert found == pytest.approx([0.002, 1.501, 1.001], abs=1e-5)


def test_bandwidths_may_differ_between_nodes_and_be_infinite():
    pairs = np.array([[0, 1e6], [2e6, 0]])
    both = (0, 0, 2, 1e6), (0, 2, 0, 1e6), (0, 0, 1, 1e6)
    for bandwidth in (1.0, np.inf):  # of sums on idle links only
        network = Network(bandwidth, 1e-3, np.inf, 1e-4, between=pairs)
        assert transfers(*both, network=network) == pytest.approx([1.001, 0.501, 1e-4])
    assert network == dataclasses.replace(network, between=pairs.tolist())
    free = Network(np.inf, 1e-3, 4e6, 1e-4)
    assert transfers(*both, network=free) == pytest.approx([1e-3, 1e-3, 0.2501])


def test_a_sum_of_one_worker_takes_no_time():
    begin = 4 * NETWORK.inside_latency  # twice to the coordinator and back
    found = simulate(MEANS, nodes=1, locals=1, collectives=True)
    assert found.seconds == pytest.approx(begin + 8 * 0.01)


def test_an_all_reduce_is_a_ring_that_the_slowest_link_bounds():
    """2 (W - 1) / W vectors leave each worker, 2 log2 W latencies; the last one begins."""
    found = simulate(MEANS, steps=2, speeds=Speeds(0.01, slow={3: 2.0}), collectives=True)
    ring = 2 * 3 / 4 * (4 * SIZE) / NETWORK.bandwidth + 4 * NETWORK.latency
    assert NETWORK.all_reduce(4, 4 * SIZE) == pytest.approx(ring)
    assert NETWORK.all_reduce(4, 4) == 4 * NETWORK.latency  # small ones take no bandwidth
    begin = 4 * NETWORK.latency  # twice to the coordinator and back, to begin together
    assert found.seconds == pytest.approx(begin + 2 * 0.02 + ring, rel=1e-3)
    waited = [worker.report.waited for worker in found.workers]
    # That all begin together is not counted; worker 0 is in the coordinator's node.
    assert waited[3] == pytest.approx(2 * NETWORK.latency + ring, rel=1e-3)
    inside = 2 * NETWORK.inside_latency
    earlier = NETWORK.latency - NETWORK.inside_latency  # it hears of the start
    assert waited[0] == pytest.approx(inside + earlier + ring + 0.02, rel=1e-3)
    assert found.sent == pytest.approx([24000, 24000], rel=1e-2)


def test_the_coordinator_serves_one_after_the_other():
    busy = Network(**{**vars(NETWORK), "coordinator": 0.01})
    calls = 4 * 8  # a claim for each step
    assert simulate(BUDGET, network=busy).seconds > 0.01 * calls


# Faults


@pytest.mark.parametrize(
    "method, back",
    [
        (LSGD, 1.0),
        slow(BUDGET, 1.017),
        slow(LSGD, 1.04),
        slow(BUDGET, 1.0154),
        slow(MEANS, 1.0),
    ],
)
def test_the_others_wait_once_for_a_worker_that_is_lost_and_it_comes_back(method, back):
    # At some of these times it comes back during an exchange. The rest of that exchange
    # must not wait for it, because it waits for the others in the next one.
    note, seen = noting(lambda worker: (*clock(worker), worker.report.waited))
    failures = dict(timeout=0.5, drops={1: 0.1}, joins={1: back})
    found = simulate(method, steps=100, observe=note, **failures)
    assert sum(worker.count for worker in found.workers) >= 4 * 100 - 1
    longest = [np.diff([waited for *_, waited in seen[i]]) for i in (0, 2, 3)]
    assert all(np.sum(waits > 0.1) == 1 and 0.4 < max(waits) < 0.6 for waits in longest)
    after = [count for now, count, _ in seen[1] if now > 0.1]
    assert after[0] > 10 and after == list(range(after[0], after[-1] + 1))


def test_a_worker_that_joins_late_takes_over():
    found = simulate(steps=50, timeout=0.5, joins={3: 0.3})
    assert [worker.count for worker in found.workers] == [50] * 4
    assert np.ptp(stacked(found.workers), axis=0).max() < 0.3


def test_a_worker_may_fail_and_come_back_several_times():
    note, seen = noting(clock)
    away = [(0.1, 0.2), (0.3, 0.45)]
    drops, joins = ({3: list(times)} for times in zip(*away))
    found = simulate(BUDGET, steps=50, timeout=0.05, drops=drops, joins=joins, observe=note)
    assert not any(a < now < b for now, _ in seen[3] for a, b in away)
    assert all(any(a < now < b for now, _ in seen[3]) for a, b in [(0.2, 0.3), (0.45, 0.6)])
    assert sum(worker.count for worker in found.workers) >= 4 * 50 - 1


def test_a_run_ends_at_a_given_time():
    taken = []
    note = lambda worker: taken.append(worker.transport.now())
    found = simulate(steps=1000, until=0.3, observe=note)
    assert found.seconds == 0.3 and 0.25 < max(taken) < 0.3
    assert simulate(steps=8, until=100.0).seconds == simulate(steps=8).seconds


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Network(1, 0, between=[[1, 2]]), "`between` must be a square of bandw"),
        (lambda: Network(1, 0, between=[[1, 0], [1, 1]]), "positive off its diagonal"),
        (lambda: Network(1, 0, between=[1, 2]), "`between` must be a square of bandwidths"),
        (lambda: Network(0, 1e-3), "`bandwidth` must be positive, got bandwidth=0"),
        (lambda: Network(1, -1), "`latency` must be at least 0, got latency=-1"),
        (lambda: Speeds(0.0), "`step` must be positive, got step=0.0"),
        (lambda: Speeds(slow={2: -3}), r"`slow\[2\]` must be positive"),
        (lambda: Speeds(jitter=2), "`jitter` must be in"),
    ],
)
def test_invalid_networks_and_speeds_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
