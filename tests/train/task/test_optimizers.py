"""The optimizer of a worker against steps computed by hand."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.config import OptimizerConfig
from train.config.schema import Optimizer
from train.task import optimizers


NAMES = typing.get_args(Optimizer)


def moved(options, gradients, start=0.0, rate=None):
    """The value of one parameter after each gradient."""
    tx = optimizers.make(options, options.learning_rate if rate is None else rate)
    x = jnp.full([1], start)
    state, seen = tx.init(x), []
    for gradient in gradients:
        updates, state = tx.update(jnp.array([gradient]), state, x)
        x = optax.apply_updates(x, updates)
        seen.append(float(x[0]))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_descends(name):
    first, second = moved(OptimizerConfig(name), [1.0, 1.0], 5.0)
    assert 5 > first > second


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_counts_steps_without_a_gradient(name):
    """The rate is 0 at the third step, which takes the second gradient."""
    rate = optax.piecewise_constant_schedule(0.1, {2: 0.0})
    options = OptimizerConfig(name, weight_decay=0.5)
    tx = optimizers.make(options, rate)
    x, gradient = jnp.ones([2, 2]), jnp.ones([2, 2])
    _, state = tx.update(gradient, tx.init(x), x)
    next_update, _ = tx.update(gradient, state, x)
    after_skip, _ = tx.update(gradient, optimizers.after_a_skip(state), x)
    assert np.abs(next_update).min() > 0 and not np.abs(after_skip).any()


def test_sgd_with_an_l2_penalty_and_nesterov():
    options = OptimizerConfig(
        learning_rate=0.1, momentum=0.5, nesterov=True, weight_decay=1.0
    )
    # g = 1 + x; m = 0.5 m + g; x -= 0.1 (g + 0.5 m)
    expected, x, m = [], 1.0, 0.0
    for _ in range(3):
        g = 1 + x
        m = 0.5 * m + g
        x -= 0.1 * (g + 0.5 * m)
        expected.append(x)
    np.testing.assert_allclose(moved(options, [1.0] * 3, 1.0), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_weight_decay_is_decoupled_from_the_gradient(name):
    options = OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.5)
    np.testing.assert_allclose(moved(options, [0.0], 2.0), [1.9], rtol=1e-6)


def test_adamw_takes_its_betas_and_eps():
    options = OptimizerConfig(name="adamw", learning_rate=0.1, betas=(0.0, 0.0), eps=1.0)
    # Without memory a step is g / (|g| + eps).
    np.testing.assert_allclose(moved(options, [3.0]), [-0.075], rtol=1e-6)


def test_a_lars_step_is_a_thousandth_of_the_weight():
    options = OptimizerConfig(name="lars", learning_rate=1.0)
    # At zero LARS has no trust ratio; after that, a step is 0.001 of the weight.
    expected = [-1.0, -1.0 - 0.001]
    np.testing.assert_allclose(moved(options, [1.0, 1.0]), expected, rtol=1e-6)


def test_only_large_gradients_are_clipped():
    options = OptimizerConfig(learning_rate=1.0, clip=2.0)
    np.testing.assert_allclose(moved(options, [5.0, 1.0]), [-2.0, -3.0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_is_skipped(name):
    options = OptimizerConfig(name=name, learning_rate=0.1, clip=1.0)
    once = moved(options, [1.0, 2.0], 1.0)
    assert moved(options, [np.nan, 1.0, np.inf, 2.0], 1.0)[1::2] == once


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_decay_of_matrices_alone(name):
    """Without gradients only decay changes the parameters, which start at 1."""
    options = OptimizerConfig(name, weight_decay=0.1, decay_of="matrices")
    params = {
        "tokens": {"embedding": jnp.ones((3, 2))},
        "norm": {"scale": jnp.ones(2)},
        "head": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    }
    for of, still in (("matrices", {"tokens", "norm"}), ("all", set())):
        tx = optimizers.make(dataclasses.replace(options, decay_of=of), 0.5)
        updates, _ = tx.update(optax.tree.zeros_like(params), tx.init(params), params)
        moving = lambda tree: all(bool(x.all()) for x in jax.tree.leaves(tree))
        assert {key for key in params if not moving(updates[key])} - {"head"} == still
        assert moving(updates["head"]["kernel"])
        assert moving(updates["head"]["bias"]) == (of == "all")


def test_muon_leaves_embeddings_to_adamw():
    """Embeddings move like vectors, to which muon never applies."""
    shapes = {"embedding": (2, 2), "bias": (4,), "kernel": (2, 2)}
    gradients = {name: jnp.array([1.0, 2, 3, 4]).reshape(x) for name, x in shapes.items()}
    params = optax.tree.zeros_like(gradients)
    tx = optimizers.make(OptimizerConfig("muon"), 0.1)
    updates, _ = tx.update(gradients, tx.init(params), params)
    as_vectors = {name: np.ravel(x) for name, x in updates.items()}
    np.testing.assert_array_equal(as_vectors["embedding"], as_vectors["bias"])
    assert np.abs(as_vectors["kernel"] - as_vectors["bias"]).max() > 0.01
