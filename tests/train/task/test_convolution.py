"""A convolution without padding and its gradients are those of XLA."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from train.task import convolution


def plainly(x, kernel):
    layout = convolution.LAYOUT
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=layout)


@pytest.mark.parametrize(
    ("images", "kernel"),
    [
        ((3, 7, 6, 2), (3, 2, 2, 5)),
        ((1, 4, 4, 3), (4, 4, 3, 2)),  # one pixel is left
        ((2, 5, 5, 1), (1, 1, 1, 4)),
    ],
)
def test_value_and_gradients(images, kernel):
    keys = jax.random.split(jax.random.key(0), 3)
    x, k = jax.random.normal(keys[0], images), jax.random.normal(keys[1], kernel)
    y, pull_back = jax.vjp(convolution.valid, x, k)
    expected, expected_back = jax.vjp(plainly, x, k)
    g = jax.random.normal(keys[2], y.shape)
    for found, wanted in zip((y, *pull_back(g)), (expected, *expected_back(g))):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_over_several_workers_and_in_bfloat16():
    x = jax.random.normal(jax.random.key(0), (4, 2, 6, 6, 3)).astype(jnp.bfloat16)
    k = jax.random.normal(jax.random.key(1), (4, 3, 3, 3, 2)).astype(jnp.bfloat16)
    gradient = lambda f: jax.vmap(jax.grad(lambda x, k: f(x, k).sum()))(x, k)
    found, wanted = gradient(convolution.valid), gradient(plainly)
    assert found.dtype == jnp.bfloat16
    found, wanted = (x.astype(jnp.float32) for x in (found, wanted))
    # Sums of three rounded sums, where XLA rounds once.
    np.testing.assert_allclose(found, wanted, rtol=0.03, atol=0.1)


def test_as_a_layer():
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 3))
    ours = nn.Conv(
        *(4, (3, 3)),
        padding="VALID",
        conv_general_dilated=convolution.conv_general_dilated,
    )
    variables = ours.init(jax.random.key(1), x)
    wanted = nn.Conv(4, (3, 3), padding="VALID").apply(variables, x)
    np.testing.assert_allclose(ours.apply(variables, x), wanted, rtol=1e-5, atol=1e-6)
