"""Asynchronous DiLoCo: one anchor, whichever worker moves it or fails."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import lsgd_jax as lj
from lsgd_jax._src.asynchronous.methods import pieces
from lsgd_jax._src.asynchronous.methods.pieces import DelayedNesterov
from lsgd_jax._src.asynchronous.simulated.clock import run_virtual
from lsgd_jax._src.asynchronous.simulated.simulator import Simulation
from lsgd_jax.asynchronous import DiLoCo, Network, Pulls, Speeds, simulator, work


OUTER = dict(learning_rate=0.5, momentum=0.6)


def anchor(worker):
    """A worker's (turn, anchor)."""
    state = worker.method.state()
    return int(state["turn"]), toys.vector(worker.method.anchor)


def test_alone_with_n_of_1_it_is_nesterovs_outer_sgd():
    """Equal to optax, the anchor and where the worker starts from it."""
    steps, x = 12, toys.start()
    outer = optax.sgd(**OUTER, nesterov=True)
    a, state, base = x, outer.init(x), toys.BASE.init(x)
    for t in range(1, steps + 1):
        _, g = toys.loss_and_grads(x, 0, t)
        u, base = toys.BASE.update(g, base, x)
        x = optax.apply_updates(x, u)
        if t % 3 == 0:
            u, state = outer.update(jax.tree.map(jnp.subtract, a, x), state, a)
            x = a = optax.apply_updates(a, u)
    found = toys.simulate(toys.training(), DiLoCo(3, **OUTER), 1, 1, steps)[0]
    expected = toys.vector(x)
    np.testing.assert_allclose(found.vector(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(anchor(found)[1], expected, rtol=1e-6, atol=1e-6)


def test_together_and_equally_fast_it_is_diloco_in_lock_step():
    outer = optax.sgd(**OUTER, nesterov=True)
    lock_step = toys.simulate(toys.training(), Pulls(lj.diloco(3, outer)), 2, 2, steps=9)
    found = toys.simulate(toys.training(), DiLoCo(3, **OUTER, together=True), 2, 2, steps=9)
    np.testing.assert_allclose(
        toys.stacked(found), toys.stacked(lock_step), rtol=1e-6, atol=1e-6
    )


def test_momentum_is_renewed_with_the_mean_of_the_last_n():
    """By hand, with g = 4, 8, 4, 8, η = 1/2, β = 1/2, N = 2."""
    outer = DelayedNesterov(0.5, 0.5, every=2)
    state = outer.init([np.zeros(1, np.float32)])
    path = []
    for turn, g in enumerate([4.0, 8.0, 4.0, 8.0], start=1):
        state = outer.added(state, [np.float32([g])])
        if turn % 2 == 0:
            state = outer.renewed(state, turn)
        path.append(outer.anchor(state)[0].item())
    # m = 6 after the second: a moves by (8/2 + 6/2) / 2; m = 9 after the fourth.
    assert path == [-1.0, -1.0 - 3.5, -5.5, -5.5 - (4 + 4.5) / 2]


@pytest.mark.slow
@pytest.mark.parametrize("momentum, stable", [(None, True), (0.9, False)])
def test_the_default_momentum_is_stable_where_local_steps_are_few(momentum, stable):
    """Parabolas of many curvatures, inner SGD with a momentum of 0.9 and 16 local steps."""
    curvatures = jnp.geomspace(1e-3, 1.0, 32)
    base = optax.sgd(0.5, momentum=0.9, nesterov=True)

    @jax.jit
    def step(x, state, own, t):
        u, state = base.update(curvatures * x, state)
        return u, state, own, jnp.sum(curvatures * x**2)

    x = jnp.ones_like(curvatures)
    task = lj.asynchronous.Training(lambda i: (x, base.init(x), ()), step)
    outer = {} if momentum is None else {"momentum": momentum}
    found = toys.simulate(task, DiLoCo(16, **outer), 1, 4, steps=800)
    furthest = max(np.abs(anchor(worker)[1]).max() for worker in found)
    assert furthest < 0.01 if stable else furthest > 10


@pytest.mark.slow
@pytest.mark.parametrize("delay, wire", [(0, "float32"), (2, "float32"), (0, "int4")])
def test_every_turn_is_taken_once_and_builds_on_the_one_before(delay, wire):
    turns = {}

    def note(worker):
        turn, vector = anchor(worker)
        turns.setdefault(turn, []).append(vector)

    method = DiLoCo(4, learning_rate=0.3, momentum=0.0, delay=delay, wire=wire)
    found = toys.simulate(
        toys.training(), method, 2, 2, 32, [1, 1.1, 1.3, 2], latency=0.02, observe=note
    )
    assert sorted(turns) == list(range(max(turns) + 1)) and max(turns) >= 4 * 32 / 4 - 4
    for vectors in turns.values():
        assert all((vector == vectors[0]).all() for vector in vectors)
    assert max(worker.report.staleness for worker in found) >= 2
    longest = max(worker.report.longest for worker in found)
    # Before its first step a worker waits for one round trip, without a delay also later.
    assert longest == pytest.approx(0.04) if delay else 0.08 <= longest <= 0.5
    assert all(worker.report.bytes_sent > 0 for worker in found)


def test_slow_workers_take_fewer_local_steps_so_that_all_come_at_the_same_time():
    came = {i: [] for i in range(3)}

    def note(worker):
        if not came[worker.index] or came[worker.index][-1][1] != worker.report.rounds:
            came[worker.index].append((worker.count, worker.report.rounds))

    method = DiLoCo(12, learning_rate=0.1, momentum=0.0, together=True)
    toys.simulate(toys.training(), method, 1, 3, 60, [1, 2, 4], observe=note)
    taken = [[b - a for (a, _), (b, _) in zip(c[3:], c[4:])] for c in came.values()]
    assert [set(steps) for steps in taken] == [{12}, {6}, {3}]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("failed", [0, 1])
def test_the_anchor_survives_a_failure_and_is_taken_over(together, failed, monkeypatch):
    monkeypatch.setattr(pieces, "SMALLEST", 2)
    outers, anchors = {}, {}

    def note(worker):
        state = worker.method.state()
        turn, vector = anchor(worker)
        anchors[turn] = vector
        held = [(piece.base, piece.momentum, piece.total) for piece in state["outers"]]
        outers.setdefault(turn, {})[worker.index] = toys.vector(held)

    method = DiLoCo(4, learning_rate=0.3, momentum=0.3, together=together)
    away = dict(drops={failed: 10.5}, joins={failed: 20}, timeout=3)
    seconds = [1, 1.1, 1.2]
    found = toys.simulate(toys.training(), method, 1, 3, 30, seconds, observe=note, **away)
    turns = [anchor(worker)[0] for worker in found]
    assert min(turns) > 6 and max(turns) - min(turns) <= 3
    for each in outers.values():
        assert all((outer == each[min(each)]).all() for outer in each.values())
    # It was not reset to the start.
    far = [np.abs(anchors[turn] - anchors[0]).max() for turn in sorted(anchors)]
    assert min(far[len(far) // 2 :]) > 0.25


def moved_by_turns(local_steps, **options):
    """A task and a method by which every turn moves each element of the anchor by -1."""
    task = toys.moving({"w": jnp.zeros([64, 256])}, lambda x, i: {"w": x["w"] * 0 - 1})
    method = DiLoCo(
        local_steps,
        learning_rate=2 / local_steps,
        momentum=0.0,
        momentum_every=2,
        weights="equal",
        **options,
    )
    return task, method


def test_a_worker_that_fails_while_it_hands_over_loses_only_what_it_still_had():
    """Its pieces take 1 s each, and the other worker has got three of eight."""
    seen = {}

    def note(worker):
        turn, moved = anchor(worker)
        seen.setdefault(turn, []).append(-moved)

    task, method = moved_by_turns(local_steps=2)
    network = Network(bandwidth=8192.0, latency=0.0)
    away = dict(drops={0: 5.5}, joins={0: 60.0}, timeout=50.0, observe=note)
    speeds = Speeds(1.0, slow={1: 1.1})
    simulator.run(task, method, 2, 1, 40, network, speeds, **away)
    after, *_ = seen.pop(2)
    np.testing.assert_array_equal(after, np.repeat([2.0, 1.0], [3 * 2048, 5 * 2048]))
    late = [moved for turn, each in seen.items() if turn > 2 for moved in each]
    assert len(late) > 40  # also after the worker has come back
    for moved in late:
        np.testing.assert_array_equal(moved - moved.min(), after - after.min())


def test_a_worker_that_takes_its_last_turn_again_leads_no_other_astray():
    """Others know the first form of the turn, or some of its pieces."""
    start = {"w": jnp.zeros([64, 256])}
    task = toys.moving(start, lambda x, i: {"w": x["w"] * 0 - 1 - i})
    method = DiLoCo(6, learning_rate=0.5, momentum=0.5, weights="equal")
    network = Network(bandwidth=40_000, latency=0.001)
    speeds = Speeds(1.0, slow={1: 1.05, 2: 1.1})
    away = dict(drops={1: 19.5}, joins={1: 20.5}, timeout=30.0)
    run = simulator.run(task, method, 3, 1, 60, network, speeds, **away)
    bases = {}
    for worker in run.workers:
        for c, piece in enumerate(worker.method.outers):
            found = bases.setdefault((c, piece.renewals[-1]), [])
            found.append(toys.vector((piece.base, piece.momentum)))
    assert max(map(len, bases.values())) > 1
    for same in bases.values():
        assert all((base == same[0]).all() for base in same)


def test_a_run_is_resumed_with_the_last_turn_of_all_workers():
    """The worker that has taken it takes no further one here."""
    task, method = moved_by_turns(local_steps=4)
    states = [worker.state(own=True) for worker in toys.simulate(task, method, 1, 3, 21)]
    states = sorted(states, key=lambda state: state["method"]["turn"])
    assert [int(state["method"]["turn"]) for state in states] == [13, 14, 15]
    moved = {}

    def note(worker):
        turn, vector = anchor(worker)
        moved.setdefault(turn, -vector)

    async def resume():
        simulation = Simulation(method, 1, 3, 24)
        *others, last = [simulation.enter(task, i) for i in range(3)]
        for worker, state in zip([*others, last], states):
            worker.take_over(state)
        trained = [work(worker, note) for worker in others]
        await asyncio.gather(last.enter(), last.tell(), *trained)

    run_virtual(resume())
    np.testing.assert_array_equal(moved[16], np.full(64 * 256, 16.0))


@pytest.mark.parametrize("together", [False, True])
def test_equal_workers_send_as_much_and_wait_as_long_as_in_lock_step(together):
    """At 100 Mbit/s, with 20 MB of parameters and 8 s between two exchanges."""
    task, _ = moved_by_turns(1)
    network = Network(bandwidth=0.94e8 / 8, latency=1e-4).scaled(64 * 256 / 5e6)

    def run(method):
        found = simulator.run(task, method, 4, 1, 4 * 12, network, Speeds(2.0, jitter=0.02))
        sent = sum(worker.report.bytes_sent for worker in found.workers)
        return found.seconds, sent

    seconds, sent = run(DiLoCo(4, together=together))
    lock_step = run(Pulls(lj.diloco(4)))
    assert seconds <= 1.001 * lock_step[0] and sent <= lock_step[1]
