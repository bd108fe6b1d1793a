"""Tests of with_state: fields of the base optimizer's state are exchanged, too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import train

import lsgd_jax as lj


W = 4
TARGETS = np.arange(1.0, W + 1, dtype=np.float32)


def trained(tx, steps):
    """W workers after gradient descent from 0 towards 1, …, W."""
    start, away = np.zeros([W, 2], np.float32), lambda x, target: 2 * (x - target)
    seen, state = train(tx, lj.Workers(1, W), start, [TARGETS] * steps, gradient=away)
    return seen[-1], state


def test_momentum_is_averaged_with_the_parameters():
    """Two steps of heavy-ball SGD, averaged after the second: by hand."""
    tx = lj.with_state(optax.sgd(0.1, momentum=0.5), lj.local_sgd(period=2), "trace")
    x, state = trained(tx, steps=2)
    first = -2 * TARGETS
    position = -0.1 * first
    second = 0.5 * first + 2 * (position - TARGETS)
    np.testing.assert_allclose(x, (position - 0.1 * second).mean(), rtol=1e-6)
    (trace,) = jax.tree.leaves(optax.tree.get(state, "trace"))
    np.testing.assert_allclose(trace, second.mean(), rtol=1e-6)


@pytest.mark.slow
def test_steps_between_exchanges_are_those_of_the_base_optimizer():
    base = optax.adam(0.1)
    x, state = trained(lj.with_state(base, lj.local_sgd(period=5), "mu", "nu"), 4)
    expected, alone = trained(optax.with_extra_args_support(base), 4)
    np.testing.assert_array_equal(x, expected)
    for name in ("mu", "nu"):
        np.testing.assert_allclose(
            optax.tree.get(state, name), optax.tree.get(alone, name), rtol=1e-6
        )
    assert int(lj.diagnostics(state)[0].misplaced.sum()) == 0


def test_a_restored_worker_takes_the_leaders_momentum():
    tx = lj.with_state(optax.sgd(0.1, momentum=0.5), lj.lsgd(0.5, 0.0, 1), "trace")
    start = np.ones([2, 3], np.float32)
    gradient = start.copy()
    gradient[1, 1] = np.nan
    (x,), state = train(tx, lj.Workers(1, 2), start, [gradient], [[1, 2]])
    np.testing.assert_array_equal(optax.tree.get(state, "trace"), start)
    np.testing.assert_allclose(x, 0.9, rtol=1e-6)


def test_learning_rates_travel_with_the_parameters():
    """A rate in `inject_hyperparams` is a scalar, unlike the parameters."""
    base = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    tx, workers = (
        lj.with_state(base, lj.lsgd(1.0, 0.0, 1), "learning_rate"),
        lj.Workers(1, W),
    )
    x, rate = workers.put((np.zeros([W, 2], np.float32), TARGETS))

    def step(x, rate):
        state = optax.tree.set(tx.init(x), learning_rate=rate)
        updates, state = tx.update(jnp.ones(2), state, x, value=jnp.square(rate - 3))
        return lj.apply_updates(x, updates), optax.tree.get(state, "learning_rate")

    x, rate = workers.fetch(workers.map(step)(x, rate))
    np.testing.assert_array_equal(rate, [3, 3, 3, 3])
    np.testing.assert_array_equal(x, np.full([W, 2], -3.0))


def test_fields_have_the_weights_of_the_gradients():
    """With GRAWA's weights 1 / i, and gradients -2 i, after one step from 0."""
    tx = lj.with_state(
        optax.sgd(0.1, momentum=0.5), lj.contrib.grawa(1.0, period=1), "trace"
    )
    start = np.zeros([W, 2], np.float32)
    gradient = start - 2 * TARGETS[:, None]
    grad = lambda x, batch: {"grad": batch}
    (x,), state = train(tx, lj.Workers(1, W), start, [gradient], extra=grad)
    mean = -2 * W / (1 / TARGETS).sum()
    np.testing.assert_allclose(optax.tree.get(state, "trace"), mean, rtol=1e-6)
    np.testing.assert_allclose(x, -0.1 * mean, rtol=1e-6)


def test_missing_fields_are_refused():
    with pytest.raises(ValueError, match="must name at least one field"):
        lj.with_state(optax.sgd(0.1), lj.local_sgd(2))
    with pytest.raises(ValueError, match="has no field 'mu'"):
        lj.with_state(optax.sgd(0.1), lj.local_sgd(2), "mu").init(jnp.zeros(2))
