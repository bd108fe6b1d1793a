"""lsgd: against NumPy, workers that are not finite, types, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj


FREE = optax.with_extra_args_support(optax.identity())


def run(workers, tx, x, updates, losses, apply=lj.apply_updates):
    """The parameters [T, W, P] after every step, and the last state."""

    def step(x, state, u, loss):
        u, state = tx.update(u, state, x, value=loss)
        return apply(x, u), state

    x = workers.put(np.asarray(x, np.float32))
    state = workers.map(tx.init)(x)
    step = workers.map(step)
    history = []
    for u, loss in zip(updates, losses):
        u, loss = workers.put((np.asarray(u, np.float32), np.asarray(loss, np.float32)))
        x, state = step(x, state, u, loss)
        history.append(np.asarray(x))
    assert step._cache_size() == 1
    return np.stack(history), state


def draw(workers, steps, seed=0):
    rng = np.random.default_rng(seed)
    shape = (steps, workers, 5)
    return (
        rng.normal(size=shape[1:]),
        0.1 * rng.normal(size=shape),
        rng.uniform(size=shape[:2]),
    )


@pytest.mark.parametrize("order", ["adapt_then_combine", "combine_then_adapt"])
@pytest.mark.parametrize(
    "nodes, locals, pulls, periods, window",
    [
        (2, 4, (0.2, 0.4), (2, 3), 3),  # periods that do not divide one another
        (1, 7, (0.3, 0.0), (1, 1), 1),
        (7, 1, (0.3, 0.5), (2, 2), 10),
        pytest.param(3, 2, (0.0, 0.5), (1, 4), 4, marks=pytest.mark.slow),
        (1, 1, (0.5, 0.5), (1, 2), 2),
        (3, 6, (1.0, 0.1), (3, 5), 4),
    ],
)
def test_against_numpy(nodes, locals, pulls, periods, window, order):
    workers = lj.Workers(nodes, locals)
    x, updates, losses = draw(nodes * locals, steps=11)
    losses[3:5, 0], updates[6, -1], losses[8] = np.nan, np.inf, np.nan
    tx = lj.lsgd(*pulls, *periods, window, order, check="every_step")
    got, _ = run(workers, tx, x, updates, losses, optax.apply_updates)
    settings = (nodes, locals, pulls, periods, window, order)
    expected = reference.lsgd(x, updates, losses, *settings)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "devices", [8, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 1))]
)
def test_every_executor_gives_the_same_numbers(devices):
    x, updates, losses = draw(8, steps=9)
    losses[2, 0], updates[4, 5] = np.nan, np.nan
    tx = lj.lsgd(0.2, 0.4, 2, 3, 3, check="every_step")
    workers = lj.Workers(2, 4, devices=jax.devices()[:devices])
    got, _ = run(workers, tx, x, updates, losses)
    expected = reference.lsgd(x, updates, losses, 2, 4, (0.2, 0.4), (2, 3), 3)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_one_worker_is_exactly_the_base_optimizer():
    x, updates, losses = draw(1, steps=6)
    got, _ = run(lj.Workers(1, 1), lj.lsgd(0.3, 0.3, 1, 2), x, updates, losses)
    alone, _ = run(lj.Workers(1, 1), FREE, x, updates, losses)
    np.testing.assert_array_equal(got, alone)


def test_a_leader_is_not_moved_by_its_own_pull():
    x, updates, losses = draw(8, steps=1)
    losses[0, 5] = -1
    got, _ = run(lj.Workers(2, 4), lj.lsgd(0.5, 0.5, 1, 1), x, updates, losses)
    alone, _ = run(lj.Workers(2, 4), FREE, x, updates, losses)
    np.testing.assert_array_equal(got[0, 5], alone[0, 5])


def test_ties_go_to_the_lowest_worker():
    x, updates, losses = draw(4, steps=1)
    losses[:] = 1
    got, _ = run(lj.Workers(1, 4), lj.lsgd(1.0, 0.0, 1, 1), x, updates, losses)
    np.testing.assert_allclose(
        got[0], np.tile(x[0] + updates[0, 0], (4, 1)), rtol=1e-5, atol=1e-6
    )


def test_the_window_never_averages_what_was_not_measured():
    """With zeros in place of steps not taken worker 1 would lead at step 1."""
    x, updates, _ = draw(2, steps=2)
    losses = np.array([[1.0, 2.0], [5.0, 2.0]])
    tx = lj.lsgd(1.0, 0.0, 1, 1, loss_window=10)
    _, state = run(lj.Workers(1, 2), tx, x, updates[:1], losses[:1])
    assert lj.diagnostics(state)[0].leader.tolist() == [0, 0]
    assert lj.diagnostics(state)[0].score.tolist() == [1, 2]
    _, state = run(lj.Workers(1, 2), tx, x, updates, losses)
    assert lj.diagnostics(state)[0].leader.tolist() == [1, 1]  # means 3 and 2


def test_pulls_follow_schedules_of_the_step():
    x, updates, losses = draw(4, steps=3)
    got, _ = run(
        lj.Workers(1, 4), lj.lsgd(lambda t: 0.1 * t, 0.0, 1, 1, 1), x, updates, losses
    )
    y = x.copy()
    for t in (1, 2, 3):
        y = y + updates[t - 1]
        y = y - 0.1 * t * (y - y[np.argmin(losses[t - 1])])
    np.testing.assert_allclose(got[-1], y, rtol=1e-5, atol=1e-6)


def test_proximal_pulls_towards_the_leaders_elected_last():
    """y ← (1 − p_G/τ_G) y + (p_G/τ_G) x̃, the same locally, then the pulls that are due."""
    nodes, locals, window = 2, 2, 1
    x, updates, losses = draw(4, steps=6)
    tx = lj.lsgd(0.2, 0.4, 2, 3, window, local_proximal=0.3, global_proximal=0.6)
    got, _ = run(lj.Workers(nodes, locals), tx, x, updates, losses)
    y, last_local, last_global = x.copy(), None, None
    for t in range(1, 7):
        y, score = y + updates[t - 1], losses[t - 1]
        if last_global is not None:
            y = y + 0.6 / 3 * (last_global - y)
        if last_local is not None:
            y = y + 0.3 / 2 * (last_local - y)
        if t % 2 == 0:
            best = np.array([0, 0, 2, 2]) + np.repeat(score.reshape(2, 2).argmin(axis=1), 2)
            last_local = y[best]
            y = y - 0.2 * (y - last_local)
        if t % 3 == 0:
            last_global = y[score.argmin()]
            y = y - 0.4 * (y - last_global)
        np.testing.assert_allclose(got[t - 1], y, rtol=1e-5, atol=1e-6)


# Workers that are not finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sick", [0, 3, 7])
def test_a_loss_that_is_not_finite_never_leads_and_is_restored_whole(bad, sick):
    x, updates, losses = draw(8, steps=4)
    losses[:, sick] = bad
    got, state = run(lj.Workers(2, 4), lj.lsgd(0.2, 0.4, 2, 4, 2), x, updates, losses)
    assert np.isfinite(got).all()
    local, all_workers = lj.diagnostics(state)
    assert sick not in {i // 4 * 4 + int(n) for i, n in enumerate(local.leader)}
    assert sick not in all_workers.leader.tolist()
    leader = int(all_workers.leader[0])
    np.testing.assert_allclose(got[3, sick], got[3, leader], rtol=1e-5, atol=1e-6)
    assert local.restored[sick] == 2 and all_workers.restored[sick] == 1
    others = [i for i in range(8) if i != sick]
    assert not local.restored[jnp.array(others)].any()


@pytest.mark.parametrize("sick", [0, 5])
def test_a_gradient_that_is_not_finite_costs_the_worker_its_steps_until_the_pull(sick):
    """With `optax.apply_updates`: parameters never become nan."""
    x, updates, losses = draw(8, steps=4)
    updates[1, sick] = np.nan
    got, state = run(
        lj.Workers(2, 4),
        lj.lsgd(0.2, 0.0, 4, 1, 1, check="every_step"),
        x,
        updates,
        losses,
        optax.apply_updates,
    )
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[1, sick], got[0, sick])
    np.testing.assert_array_equal(got[2, sick], got[0, sick])
    (level,) = lj.diagnostics(state)
    leader = sick // 4 * 4 + int(level.leader[sick])
    np.testing.assert_allclose(got[3, sick], got[3, leader], rtol=1e-5, atol=1e-6)
    assert not lj.waiting(state).any()


def test_no_worker_finite_means_no_pull_and_a_node_without_any_waits_for_the_others():
    x, updates, losses = draw(8, steps=4)
    losses[:, :4] = np.nan  # all of node 0
    got, state = run(lj.Workers(2, 4), lj.lsgd(0.2, 0.4, 2, 4, 1), x, updates, losses)
    free = x[:4] + updates[:2, :4].sum(axis=0)
    np.testing.assert_allclose(got[1, :4], free, rtol=1e-5, atol=1e-6)
    leader = int(lj.diagnostics(state)[1].leader[0])
    assert leader >= 4
    np.testing.assert_allclose(
        got[3, :4], np.tile(got[3, leader], (4, 1)), rtol=1e-5, atol=1e-6
    )

    losses[:] = np.nan
    got, state = run(lj.Workers(2, 4), lj.lsgd(0.2, 0.4, 2, 4, 1), x, updates, losses)
    np.testing.assert_allclose(got[-1], x + updates.sum(axis=0), rtol=1e-5, atol=1e-6)
    assert [level.leader.tolist() for level in lj.diagnostics(state)] == [[-1] * 8] * 2


def test_parameters_that_are_not_finite_train_on_behind_apply_if_finite():
    """Parameters and momentum are finite after the next pull, and then move on."""
    workers = lj.Workers(2, 4)
    target = np.linspace(-1, 1, 3, dtype=np.float32)
    base = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), max_consecutive_errors=1000)
    tx = optax.chain(base, lj.lsgd(0.1, 0.1, 4, 8, 2))

    def step(x, state):
        loss, grads = jax.value_and_grad(lambda x: ((x - target) ** 2).sum())(x)
        u, state = tx.update(grads, state, x, value=loss)
        return lj.apply_updates(x, u), state, loss

    start = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    start[0] = np.nan
    start[6, 1] = np.inf
    x = workers.put(start)
    state = workers.map(tx.init)(x)
    step = workers.map(step, donate=(0, 1))
    for t in range(1, 65):
        x, state, loss = step(x, state)
        healthy = np.isfinite(np.asarray(x)).all(axis=1)
        assert healthy.tolist() == [t >= 4 or i not in (0, 6) for i in range(8)]
        if t == 4:
            restored = np.asarray(x)[0].copy()
    momentum = optax.tree.get(state, "trace")
    assert np.isfinite(momentum).all() and np.abs(np.asarray(momentum)[0]).max() > 0
    assert np.abs(np.asarray(x)[0] - restored).max() > 1e-3  # it moved on by itself
    assert float(loss.max()) < 0.05


# Types, composition, cost


def test_bfloat16_stays_bfloat16_and_only_updates_of_that_width_travel():
    workers = lj.Workers(2, 4)
    tx = optax.chain(optax.adam(0.1), lj.lsgd(0.2, 0.4, 1, 2))
    x = workers.put({"h": jnp.ones((8, 3), jnp.bfloat16), "f": jnp.ones((8, 2))})

    def step(x, state, loss):
        u, state = tx.update(x, state, x, value=loss)
        return lj.apply_updates(x, u), state

    state = workers.map(tx.init)(x)
    before = jax.tree.map(jax.typeof, state)
    step = workers.map(step)
    for _ in range(3):
        x, state = step(x, state, workers.put(jnp.arange(8, dtype=jnp.bfloat16)))
    assert x["h"].dtype == jnp.bfloat16 and x["f"].dtype == jnp.float32
    assert jax.tree.map(jax.typeof, state) == before
    assert lj.diagnostics(state)[0].payload == 3 * 2 + 2 * 4 + 4


@pytest.mark.parametrize(
    "base",
    [
        optax.adamw(0.1),
        optax.lars(0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9, nesterov=True)),
        optax.inject_hyperparams(optax.sgd)(
            learning_rate=optax.linear_schedule(0.1, 0.0, 9)
        ),
        optax.partition(
            {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
            {"a": "train", "b": "freeze"},
        ),
    ],
    ids=["adamw", "lars", "clip+nesterov", "inject_hyperparams", "partition"],
)
def test_any_optax_base_optimizer(base):
    workers = lj.Workers(2, 2)
    tx = optax.chain(base, lj.lsgd(0.2, 0.4, 1, 2))
    x = workers.put({"a": jnp.arange(8.0).reshape(4, 2), "b": jnp.ones(4)})

    def step(x, state):
        loss, grads = jax.value_and_grad(lambda x: (x["a"] ** 2).sum() + x["b"] ** 2)(x)
        u, state = tx.update(grads, state, x, value=loss)
        return lj.apply_updates(x, u), state, loss

    state, step = workers.map(tx.init)(x), workers.map(step, donate=(0, 1))
    first = None
    for _ in range(6):
        x, state, loss = step(x, state)
        first = loss if first is None else first
    assert step._cache_size() == 1
    assert float(loss.mean()) < float(first.mean())


def test_types_are_sound_in_a_shard_map_of_ones_own():
    """With jax's check of varying types: what is shared is proved equal on all workers."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(2, 4),
        ("node", "local"),
        axis_types=(AxisType.Auto,) * 2,
    )
    tx = optax.chain(
        optax.sgd(0.1), lj.lsgd(0.2, 0.4, 2, 3, local_proximal=0.1, global_proximal=0.1)
    )
    rows = P(("node", "local"))
    is_shared = lambda node: isinstance(node, lj.Shared) and node.axes is None

    def specs(tree):
        return jax.tree.map(
            lambda n: P() if is_shared(n) else rows, tree, is_leaf=is_shared
        )

    stack = lambda tree, f: jax.tree.map(
        lambda n: n if is_shared(n) else jax.tree.map(f, n),
        tree,
        is_leaf=is_shared,
    )

    def train(x, loss):
        x, loss = x[0], loss[0]
        state = tx.init(x)
        for _ in range(4):
            u, state = tx.update(x, state, x, value=loss)
            x = lj.apply_updates(x, u)
        return x[None], stack(state, lambda leaf: leaf[None])

    state = jax.eval_shape(tx.init, jnp.ones(3))
    f = jax.shard_map(
        train,
        mesh=mesh,
        in_specs=(rows, rows),
        out_specs=(rows, specs(state)),
        check_vma=True,
    )
    x, losses = np.random.default_rng(0).normal(size=(8, 3)), np.arange(8.0)
    got, _ = jax.jit(f)(x.astype(np.float32), losses.astype(np.float32))

    workers = lj.Workers(2, 4)

    def step(x, state, loss):
        u, state = tx.update(x, state, x, value=loss)
        return lj.apply_updates(x, u), state

    placed = workers.put(x.astype(np.float32))
    state, step = workers.map(tx.init)(placed), workers.map(step)
    for _ in range(4):
        placed, state = step(placed, state, workers.put(losses.astype(np.float32)))
    np.testing.assert_allclose(got, placed, rtol=1e-5, atol=1e-6)


def test_levels_switched_off_leave_nothing_behind():
    workers = lj.Workers(2, 4)
    x = workers.put(jnp.ones((8, 2)))
    assert not jax.tree.leaves(workers.map(lj.lsgd(0.0, 0.0).init)(x))
    (level,) = lj.diagnostics(workers.map(lj.lsgd(0.0, 0.5).init)(x))
    assert level.axes == ("node", "local")


def test_other_axis_names():
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2),
        ("host", "gpu"),
        axis_types=(AxisType.Auto,) * 2,
    )
    tx = lj.lsgd(0.5, 0.5, 1, 1, axes=("host", "gpu"))
    rows = P(("host", "gpu"))

    def pulled(x, loss):
        return tx.update(jnp.zeros_like(x), tx.init(x), x, value=loss[0])[0]

    f = jax.shard_map(
        pulled, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False
    )
    u = jax.jit(f)(jnp.array([0.0, 4.0, 8.0, 12.0]), jnp.array([0.0, 1.0, 2.0, 3.0]))
    assert u.tolist() == [0, -3, -4, -7]  # local: 0, 2, 8, 10, then halfway to 0


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"local_pull": -0.1}, r"`local_pull` must be in \[0, 1\]"),
        (
            {"global_pull": 1.5},
            r"`global_pull` must be in \[0, 1\] .*, got global_pull=1.5",
        ),
        ({"local_pull": float("nan")}, "`local_pull` must be in"),
        ({"local_period": 0}, "`local_period` must be a positive int, got local_period=0"),
        (
            {"global_period": 2.5},
            "`global_period` must be a positive int, got global_period=2.5",
        ),
        ({"loss_window": 0}, "`loss_window` must be a positive int, got loss_window=0"),
        (
            {"order": "both"},
            "`order` must be one of 'adapt_then_combine', 'combine_then_adapt'",
        ),
        ({"local_proximal": 2}, "`local_proximal` must be in"),
    ],
)
def test_bad_settings_are_refused_when_built(settings, message):
    with pytest.raises(ValueError, match=message):
        lj.lsgd(**settings)


def test_update_says_what_is_missing():
    workers = lj.Workers(1, 2)
    tx = lj.lsgd()
    x = workers.put(jnp.ones((2, 3)))
    state = workers.map(tx.init)(x)
    with pytest.raises(ValueError, match="value=loss"):
        workers.map(lambda x, s: tx.update(x, s, x))(x, state)
    with pytest.raises(ValueError, match=r"a scalar: .*got value="):
        workers.map(lambda x, s: tx.update(x, s, x, value=x))(x, state)
    with pytest.raises(ValueError, match="needs the parameters"):
        workers.map(lambda x, s: tx.update(x, s, value=x[0]))(x, state)
