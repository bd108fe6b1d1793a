"""Asynchronous DiLoCo: one anchor, whoever brings pseudo-gradients and whoever is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import lsgd_jax as lj
from lsgd_jax._src.asynchronous import memory
from lsgd_jax.asynchronous import DiLoCo, Pulls


OUTER = dict(learning_rate=0.5, momentum=0.6)


def anchor(worker):
    """(turn, anchor) that a worker has."""
    state = worker.running.state()
    return int(state["turn"]), np.asarray(state["outer"])[: worker.flat.size]


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
    found = memory.run(toys.training(), DiLoCo(3, **OUTER), 1, 1, steps)[0]
    expected = found.flat.vector(x)
    np.testing.assert_allclose(found.vector(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(anchor(found)[1], expected, rtol=1e-6, atol=1e-6)


def test_together_and_equally_fast_it_is_diloco_in_lock_step():
    outer = optax.sgd(**OUTER, nesterov=True)
    lock_step = memory.run(toys.training(), Pulls(lj.diloco(3, outer)), 2, 2, steps=9)
    found = memory.run(toys.training(), DiLoCo(3, **OUTER, together=True), 2, 2, steps=9)
    np.testing.assert_allclose(
        toys.stacked(found), toys.stacked(lock_step), rtol=1e-6, atol=1e-6
    )


def test_momentum_is_renewed_with_the_mean_of_the_last_n():
    """By hand, with g = 4, 8, 4, 8, η = 1/2, β = 1/2, N = 2."""
    from lsgd_jax._src.asynchronous.mixing import delayed_nesterov

    outer, path = (jnp.zeros(1), jnp.zeros(1), jnp.zeros(1)), []
    for turn, g in enumerate([4.0, 8.0, 4.0, 8.0], start=1):
        outer = delayed_nesterov(outer, jnp.full([1], g), turn, 0.5, 0.5, every=2)
        path.append(outer[0].item())
    # m = 6 after the second: a moves by (8/2 + 6/2) / 2; m = 9 after the fourth.
    assert path == [-1.0, -1.0 - 3.5, -5.5, -5.5 - (4 + 4.5) / 2]


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
    found = memory.run(task, DiLoCo(16, **outer), 1, 4, steps=1600)
    furthest = max(np.abs(anchor(worker)[1]).max() for worker in found)
    assert furthest < 0.01 if stable else furthest > 100


@pytest.mark.parametrize("delay", [0, 2])
def test_every_turn_is_taken_once_and_builds_on_the_one_before(delay):
    turns = {}

    def note(worker):
        turn, vector = anchor(worker)
        turns.setdefault(turn, []).append(vector)

    method = DiLoCo(4, learning_rate=0.3, momentum=0.0, delay=delay)
    found = memory.run(
        toys.training(),
        method,
        2,
        2,
        steps=32,
        step_seconds=[1, 1.1, 1.3, 2],
        latency=0.2,
        observe=note,
    )
    assert sorted(turns) == list(range(max(turns) + 1)) and max(turns) >= 4 * 32 / 4 - 4
    for vectors in turns.values():
        assert all((vector == vectors[0]).all() for vector in vectors)
    assert max(worker.report.staleness for worker in found) >= 2
    longest = max(worker.report.longest for worker in found)
    assert longest == 0 if delay else 0 < longest <= 1
    assert all(worker.report.bytes_sent > 0 for worker in found)


def test_slow_workers_take_fewer_local_steps_so_that_all_come_at_the_same_time():
    came = {i: [] for i in range(3)}

    def note(memory, worker):
        if not came[worker.index] or came[worker.index][-1][1] != worker.report.rounds:
            came[worker.index].append((worker.count, worker.report.rounds))

    method = DiLoCo(12, learning_rate=0.1, momentum=0.0, together=True)
    found = memory.run(
        toys.training(), method, 1, 3, steps=60, step_seconds=[1, 2, 4], events=note
    )
    taken = [[b - a for (a, _), (b, _) in zip(c[3:], c[4:])] for c in came.values()]
    assert [set(steps) for steps in taken] == [{12}, {6}, {3}]
    assert max(worker.report.longest for worker in found) <= 12 * 4 - 12  # the first time


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
def test_the_anchor_survives_whoever_is_lost(together, lost):
    before = []

    def lose(memory, worker):
        if worker.index == lost and worker.count == 10 and lost not in memory.lost:
            memory.lose(lost)
            before.append(max(report.rounds for report in reports(memory)))

    reports = lambda memory: memory.coordinator.standing().reports.values()
    method = DiLoCo(4, learning_rate=0.3, momentum=0.3, together=together)
    found = memory.run(
        toys.training(), method, 1, 3, steps=30, events=lose, grace=3, latency=0.1
    )
    rest = [worker for worker in found if worker.index != lost]
    turns = [anchor(worker)[0] for worker in rest]
    assert min(turns) > before[0] + 4 and max(turns) - min(turns) <= 2
    assert max(worker.report.longest for worker in rest) <= 2 * 3 + 1
    # It was not set back to where all have started.
    start = found[0].flat.vector(toys.start())
    assert np.abs(anchor(rest[0])[1] - start).max() > 0.5


def test_one_that_starts_again_takes_over_the_anchor_and_its_momentum():
    lost, outers = [], {}

    def lose(memory, worker):
        state = worker.running.state()
        outers.setdefault(int(state["turn"]), {})[worker.index] = state["outer"]
        if worker.index == 2 and worker.count == 10 and not lost:
            lost.append(int(state["turn"]))
            memory.lose(2)

    found = memory.run(
        toys.training(),
        DiLoCo(4, learning_rate=0.3, together=True),
        1,
        3,
        steps=30,
        events=lose,
        restarts=True,
        grace=3,
    )
    assert anchor(found[2])[0] > lost[0] + 2
    for each in outers.values():
        assert all((outer == each[min(each)]).all() for outer in each.values())


def test_one_that_is_not_finite_brings_nothing_and_takes_the_anchor():
    for together in (False, True):
        task = toys.broken(toys.training(), 1, steps=[3])
        method = DiLoCo(4, together=together, weights="equal")
        found = memory.run(task, method, 1, 3, steps=16)
        assert np.isfinite(toys.stacked(found)).all()
        assert all(np.isfinite(anchor(worker)[1]).all() for worker in found)


@pytest.mark.parametrize(
    "given",
    [
        {"local_steps": 0},
        {"learning_rate": -1.0},
        {"momentum": 2.0},
        {"momentum_every": 0},
        {"weights": "none"},
        {"delay": -1},
    ],
)
def test_what_it_refuses(given):
    with pytest.raises(ValueError, match=f"`{next(iter(given))}` must be"):
        DiLoCo(**given)
