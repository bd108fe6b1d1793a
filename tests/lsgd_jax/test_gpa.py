"""Tests of gpa, against its three equations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj


STEPS = 12
GRADIENTS = np.random.default_rng(0).normal(size=[STEPS, 3]).astype(np.float32)
START = {"w": jnp.array([1.0, -2.0, 0.5]), "count": jnp.int32(7)}


def trained(tx, start=START):
    y, state = start, tx.init(start)
    for gradient in GRADIENTS:
        zero = np.zeros((), jax.dtypes.float0)
        updates, state = tx.update({"w": jnp.asarray(gradient), "count": zero}, state, y)
        y = {"w": optax.apply_updates(y["w"], updates["w"]), "count": y["count"]}
    return y, state


@pytest.mark.parametrize("mu_y, mu_x", [(0.7, 0.9967), (0.0, 0.5), (0.9, 0.0)])
def test_equations(mu_y, mu_x):
    x = y = z = np.asarray(START["w"], np.float64)
    trace = np.zeros(3)
    for gradient in GRADIENTS:
        trace = 0.9 * trace + gradient
        z = z - 0.1 * trace
        x = mu_x * x + (1 - mu_x) * z
        y = mu_y * x + (1 - mu_y) * z
    base = optax.masked(optax.sgd(0.1, momentum=0.9), {"w": True, "count": False})
    params, state = trained(lj.gpa(base, mu_y, mu_x))
    np.testing.assert_allclose(params["w"], y, rtol=1e-5, atol=1e-6)
    average = lj.gpa_average((optax.EmptyState(), state), params)
    np.testing.assert_allclose(average["w"], x, rtol=1e-5, atol=1e-6)
    assert int(average["count"]) == 7


def test_workers_are_averaged_and_a_bad_step_is_left_out():
    """Two workers, one of whose gradients is nan in the first of two steps."""
    tx = optax.chain(
        optax.apply_if_finite(lj.gpa(optax.sgd(0.1), 0.5, 0.5), 9), lj.local_sgd(2)
    )
    workers = lj.Workers(1, 2)
    x, loss = workers.put((np.zeros([2, 1], np.float32), np.ones([2], np.float32)))
    state = workers.map(tx.init)(x)

    def step(x, gradient, state, loss):
        updates, state = tx.update(gradient, state, x, value=loss)
        return lj.apply_updates(x, updates), state

    step = workers.map(step)
    for gradients in ([[1.0], [np.nan]], [[1.0], [1.0]]):
        given = workers.put(np.array(gradients, np.float32))
        x, state = step(x, given, state, loss)
    # Worker 0 steps by -0.075 and then by -0.0875, worker 1 by -0.075 only.
    mean = -(0.075 + 0.0875 + 0.075) / 2
    np.testing.assert_allclose(x, mean, rtol=1e-5)
    offsets = [[0.5 * (0.025 + 0.05)], [0.025]]
    np.testing.assert_allclose(lj.gpa_average(state, x) - x, offsets, rtol=1e-5)


def test_narrow_parameters():
    tx = lj.gpa(optax.sgd(0.1))
    y = jnp.ones(2, jnp.bfloat16)
    updates, state = tx.update(jnp.ones(2, jnp.bfloat16), tx.init(y), y)
    assert updates.dtype == state.offset.dtype == jnp.float32
    assert lj.gpa_average(state, y).dtype == jnp.bfloat16


@pytest.mark.parametrize("options", [{"mu_y": 1.0}, {"mu_y": -0.1}, {"mu_x": 1.1}])
def test_wrong_options(options):
    with pytest.raises(ValueError, match="`mu_[xy]` must be"):
        lj.gpa(optax.sgd(0.1), **options)


def test_another_state_is_refused():
    with pytest.raises(ValueError, match="`state` must contain the state of `gpa`"):
        lj.gpa_average(optax.sgd(0.1).init(jnp.ones(2)), jnp.ones(2))
