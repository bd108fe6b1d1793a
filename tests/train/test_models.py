"""The networks: sizes, and the pooling that stands in for `nn.max_pool`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.models import CNN7, DigitsCNN, max_pool_2x2


@pytest.mark.parametrize("model, size, count", [(CNN7, 28, 351_946), (DigitsCNN, 8, None)])
def test_parameters_and_logits(model, size, count):
    x = jnp.zeros((2, size, size, 3 if size == 28 else 1))
    variables = model().init(jax.random.key(0), x, train=False)
    assert model().apply(variables, x, train=False).shape == (2, 10)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert count is None or numbers == count


def test_pooling_is_that_of_flax_gradient_included():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 6, 3)), jnp.float32)
    flax_pool = lambda x: nn.max_pool(x, (2, 2), (2, 2))
    np.testing.assert_array_equal(max_pool_2x2(x), flax_pool(x))
    gradient = lambda pool: jax.grad(lambda x: (pool(x) ** 2).sum())(x)
    np.testing.assert_array_equal(gradient(max_pool_2x2), gradient(flax_pool))


def test_dropout_only_while_training():
    x = jnp.ones((1, 8, 8, 1))
    model = DigitsCNN()
    variables = model.init(jax.random.key(0), x, train=False)
    drop = lambda seed: model.apply(
        variables, x, True, rngs={"dropout": jax.random.key(seed)}
    )
    assert not np.array_equal(drop(0), drop(1))
    np.testing.assert_array_equal(
        model.apply(variables, x, False), model.apply(variables, x, False)
    )
