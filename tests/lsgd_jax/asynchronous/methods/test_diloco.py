"""Asynchronous DiLoCo: one anchor, whichever worker moves it or fails."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import lsgd_jax as lj
from lsgd_jax._src.asynchronous.methods.anchors import delayed_nesterov
from lsgd_jax.asynchronous import DiLoCo, Pulls


OUTER = dict(learning_rate=0.5, momentum=0.6)


def anchor(worker):
    """A worker's (turn, anchor)."""
    state = worker.method.state()
    return int(state["turn"]), toys.vector(state["outers"][0].anchor)


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
    tx, anchor, path = delayed_nesterov(0.5, 0.5, every=2), jnp.zeros([]), []
    state = tx.init(anchor)
    for turn, g in enumerate([4.0, 8.0, 4.0, 8.0], start=1):
        step, state = tx.update(jnp.float32(g), state, turn=turn)
        path.append((anchor := anchor + step).item())
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
def test_the_anchor_survives_a_failure_and_is_taken_over(together, failed):
    outers = {}

    def note(worker):
        state = worker.method.state()
        turn = outers.setdefault(int(state["turn"]), {})
        turn[worker.index] = toys.vector(state["outers"])

    method = DiLoCo(4, learning_rate=0.3, momentum=0.3, together=together)
    away = dict(drops={failed: 10.5}, joins={failed: 20}, timeout=3)
    seconds = [1, 1.1, 1.2]
    found = toys.simulate(toys.training(), method, 1, 3, 30, seconds, observe=note, **away)
    turns = [anchor(worker)[0] for worker in found]
    assert min(turns) > 6 and max(turns) - min(turns) <= 3
    for each in outers.values():
        assert all((outer == each[min(each)]).all() for outer in each.values())
    # It was not reset to the start.
    start = outers[0][failed]
    far = lambda outer: np.abs((outer - start)[:10]).max()
    late = range(max(outers) // 2, max(outers))
    assert min(far(next(iter(outers[turn].values()))) for turn in late) > 0.25
