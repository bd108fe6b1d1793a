"""Batch normalization and its gradients are those of flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.task.batch_norm import BatchNorm


SCALE, BIAS = jnp.array([0.5, -1.5, 2.0]), jnp.array([1.0, 0.0, -3.0])


def random(seed, *shape):
    return 2 + 3 * jax.random.normal(jax.random.key(seed), (*shape, 3))


def variables():
    stats = {"mean": jnp.array([0.1, -0.2, 0.3]), "var": jnp.array([1.0, 0.5, 2.0])}
    return {"params": {"scale": SCALE, "bias": BIAS}, "batch_stats": stats}


def both(train):
    """Ours and that of flax."""
    options = dict(use_running_average=not train, momentum=0.9)
    return BatchNorm(**options), nn.BatchNorm(**options)


@pytest.mark.parametrize("shape", [(4, 5, 6), (7,), (2, 1, 1)])
def test_values_statistics_and_gradients(shape):
    x, weights = random(0, *shape), random(1, *shape)

    def loss(layer, params, x):
        all_of_it = variables() | {"params": params}
        y, renewed = layer.apply(all_of_it, x, mutable="batch_stats")
        return (weights * y).sum(), (y, renewed)

    def results(layer):
        gradient = jax.grad(loss, argnums=(1, 2), has_aux=True)
        return gradient(layer, variables()["params"], x)

    ours, flax = map(results, both(train=True))
    assert jax.tree.structure(ours) == jax.tree.structure(flax)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), ours, flax
    )


def test_by_running_averages_and_at_the_start():
    x = random(0, 4, 5)
    ours, flax = both(train=False)
    wanted = flax.apply(variables(), x)
    np.testing.assert_allclose(ours.apply(variables(), x), wanted, rtol=1e-5, atol=1e-6)
    for train in (True, False):  # statistics of what a model is made with are not kept
        first, second = (layer.init(jax.random.key(0), x) for layer in both(train))
        jax.tree.map(np.testing.assert_array_equal, first, second)


def test_of_several_workers_and_in_bfloat16():
    x = random(0, 2, 8, 4).astype(jnp.bfloat16)

    def results(layer):
        def loss(x):
            y, stats = layer.apply(variables(), x, mutable="batch_stats")
            return jnp.sum(y**2), (y, stats)

        return jax.vmap(jax.grad(loss, has_aux=True))(x)

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
    x = jnp.full((4, 3), 1000.1)
    y, pull_back = jax.vjp(
        lambda x: both(True)[0].apply(variables(), x, mutable=True)[0], x
    )
    np.testing.assert_allclose(y, np.broadcast_to(BIAS, y.shape), rtol=1e-3, atol=0.2)
    assert np.isfinite(pull_back(jnp.ones_like(x))[0]).all()
