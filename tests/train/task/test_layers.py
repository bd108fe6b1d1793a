"""Layers and gradients equal those of flax and XLA."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from toys import slow

from train.task import layers
from train.task.layers import BatchNorm


SCALE, BIAS = jnp.array([0.5, -1.5, 2.0]), jnp.array([1.0, 0.0, -3.0])


def random(seed, *shape):
    return 2 + 3 * jax.random.normal(jax.random.key(seed), (*shape, 3))


def variables():
    stats = {"mean": jnp.array([0.1, -0.2, 0.3]), "var": jnp.array([1.0, 0.5, 2.0])}
    return {"params": {"scale": SCALE, "bias": BIAS}, "batch_stats": stats}


def both(train):
    """Our layer and the layer of flax."""
    options = dict(use_running_average=not train, momentum=0.9)
    return BatchNorm(**options), nn.BatchNorm(**options)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 5, 6), (7,)])
def test_batch_norm_has_the_values_statistics_and_gradients_of_flax(shape):
    x, weights = random(0, *shape), random(1, *shape)

    def loss(layer, params, x):
        all_of_it = variables() | {"params": params}
        y, renewed = layer.apply(all_of_it, x, mutable="batch_stats")
        return (weights * y).sum(), (y, renewed)

    def results(layer):
        gradient = jax.grad(loss, argnums=(1, 2), has_aux=True)
        return jax.jit(gradient, static_argnums=0)(layer, variables()["params"], x)

    ours, flax = map(results, both(train=True))
    assert jax.tree.structure(ours) == jax.tree.structure(flax)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), ours, flax
    )


def test_batch_norm_with_running_averages_and_at_initialization():
    x = random(0, 4, 5)
    ours, flax = both(train=False)
    found, wanted = (jax.jit(layer.apply)(variables(), x) for layer in (ours, flax))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    for train in (True, False):  # initialization does not update the statistics
        first, second = (jax.jit(layer.init)(jax.random.key(0), x) for layer in both(train))
        jax.tree.map(np.testing.assert_array_equal, first, second)


def test_batch_norm_of_several_workers_in_bfloat16():
    x = random(0, 2, 8, 4).astype(jnp.bfloat16)

    def results(layer):
        def loss(x):
            y, stats = layer.apply(variables(), x, mutable="batch_stats")
            return jnp.sum(y**2), (y, stats)

        return jax.jit(jax.vmap(jax.grad(loss, has_aux=True)))(x)

    (of_x, (y, stats)), (of_x_flax, (y_flax, stats_flax)) = map(results, both(train=True))
    assert (of_x.dtype, y.dtype) == (of_x_flax.dtype, y_flax.dtype)
    as_float = lambda x: np.asarray(x, np.float32)
    np.testing.assert_allclose(as_float(y), as_float(y_flax), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(as_float(of_x), as_float(of_x_flax), rtol=2e-2, atol=2e-2)
    wanted = jax.tree.leaves(stats_flax)
    for found, flax in zip(jax.tree.leaves(stats), wanted, strict=True):
        assert found.dtype == flax.dtype
        np.testing.assert_allclose(found, flax, rtol=1e-2, atol=1e-2)


def test_a_constant_channel_stays_finite():
    @jax.jit
    def value_and_gradient(x):
        normed = lambda x: both(True)[0].apply(variables(), x, mutable=True)[0]
        y, pull_back = jax.vjp(normed, x)
        return y, *pull_back(jnp.ones_like(x))

    y, gradient = value_and_gradient(jnp.full((4, 3), 1000.1))
    np.testing.assert_allclose(y, np.broadcast_to(BIAS, y.shape), rtol=1e-3, atol=0.2)
    assert np.isfinite(gradient).all()


def plainly(x, kernel):
    layout = layers.LAYOUT
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=layout)


@pytest.mark.parametrize(
    ("images", "kernel", "dtype"),
    [
        ((3, 7, 6, 2), (3, 2, 2, 5), "float32"),
        slow((1, 4, 4, 3), (4, 4, 3, 2), "float32"),  # one pixel is left
        slow((2, 5, 5, 1), (1, 1, 1, 4), "float32"),
        ((2, 6, 6, 3), (3, 3, 3, 2), "bfloat16"),
    ],
)
def test_a_convolution_of_several_workers_and_its_gradients(images, kernel, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, shape: jax.random.normal(key, (4, *shape)).astype(dtype)
    x, k = draw(keys[0], images), draw(keys[1], kernel)
    g = draw(keys[2], jax.eval_shape(plainly, x[0], k[0]).shape)

    def results(convolution):
        def of_worker(x, k, g):
            y, pull_back = jax.vjp(convolution, x, k)
            return y, *pull_back(g)

        return jax.jit(jax.vmap(of_worker))(x, k, g)

    # In bfloat16 our gradient adds three rounded sums; XLA rounds once.
    rtol, atol = (1e-5, 1e-5) if dtype == "float32" else (0.03, 0.1)
    for found, wanted in zip(results(layers.valid), results(plainly)):
        assert found.dtype == wanted.dtype == dtype
        found, wanted = (x.astype(jnp.float32) for x in (found, wanted))
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


def test_a_convolution_as_a_layer():
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 3))
    ours = nn.Conv(
        *(4, (3, 3)),
        padding="VALID",
        conv_general_dilated=layers.conv_general_dilated,
    )
    variables = ours.init(jax.random.key(1), x)
    wanted = nn.Conv(4, (3, 3), padding="VALID").apply(variables, x)
    np.testing.assert_allclose(ours.apply(variables, x), wanted, rtol=1e-5, atol=1e-6)
