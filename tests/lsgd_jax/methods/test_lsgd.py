"""Tests of lsgd: against NumPy, with workers that are not finite, and of its errors."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import lsgd_jax as lj


def run(workers, tx, x, updates, losses, apply=lj.apply_updates):
    """Returns the parameters [T, W, P] after every step, and the last state."""
    x, updates = np.asarray(x, np.float32), np.asarray(updates, np.float32)
    seen, state = harness.train(tx, workers, x, updates, losses, apply)
    return np.stack(seen), state


def draw(workers, steps, seed=0):
    rng = np.random.default_rng(seed)
    shape = (steps, workers, 5)
    return (
        rng.normal(size=shape[1:]),
        0.1 * rng.normal(size=shape),
        rng.uniform(size=shape[:2]),
    )


ORDERS = ("adapt_then_combine", "combine_then_adapt")
SETTINGS = [
    (2, 4, (0.2, 0.4), (2, 3), 3),  # neither period divides the other
    (1, 7, (0.3, 0.0), (1, 1), 1),
    (7, 1, (0.3, 0.5), (2, 2), 10),
    (3, 2, (0.0, 0.5), (1, 4), 4),
    (1, 1, (0.5, 0.5), (1, 2), 2),
    (3, 6, (1.0, 0.1), (3, 5), 4),
]


@pytest.mark.parametrize(
    "nodes, locals, pulls, periods, window, order",
    harness.mostly_slow(
        [(*settings, order) for settings in SETTINGS for order in ORDERS],
        # By default the two orders take turns.
        fast=[(*settings, order) for settings, order in zip(SETTINGS[::2], ORDERS)],
    ),
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


def test_proximal_steps_pull_towards_the_last_elected_leaders():
    """y ← (1 − p_G/τ_G) y + (p_G/τ_G) x̃, then the same locally, then the due pulls."""
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


@pytest.mark.slow
def test_one_axis_is_one_node():
    """Under `pmap` as under `Workers(nodes=1)`."""
    x, updates, losses = draw(4, steps=4)
    options = dict(local_period=2, global_period=4, loss_window=1)
    expected, _ = run(lj.Workers(1, 4), lj.lsgd(0.2, 0.4, **options), x, updates, losses)
    tx = lj.lsgd(0.2, 0.4, **options, axes=("batch",))

    def step(x, state, u, loss):
        u, state = tx.update(u, state, x, loss=loss)
        return lj.apply_updates(x, u), state

    state, step = jax.pmap(tx.init, axis_name="batch")(x), jax.pmap(step, axis_name="batch")
    for t in range(4):
        x, state = step(x, state, updates[t], losses[t])
        np.testing.assert_allclose(x, expected[t], rtol=1e-5, atol=1e-6)


# Types and errors


def test_bfloat16_parameters_travel_in_bfloat16():
    tx = optax.chain(optax.adam(0.1), lj.lsgd(0.2, 0.4, 1, 2))
    x = {"h": jnp.ones((8, 3), jnp.bfloat16), "f": jnp.ones((8, 2))}
    (x,), state = harness.train(tx, lj.Workers(2, 4), x, [x], [np.arange(8)])
    assert x["h"].dtype == jnp.bfloat16 and x["f"].dtype == jnp.float32
    assert lj.diagnostics(state)[0].payload == 3 * 2 + 2 * 4 + 4


def test_a_level_with_zero_pull_has_no_state():
    workers = lj.Workers(2, 4)
    x = workers.put(jnp.ones((8, 2)))
    assert not workers.map(lj.lsgd(0.0, 0.0).init)(x).pulls
    (level,) = lj.diagnostics(workers.map(lj.lsgd(0.0, 0.5).init)(x))
    assert level.axes == ("node", "local")
