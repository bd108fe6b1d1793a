"""Networks: sizes, blocks, and the pooling that replaces `nn.max_pool`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.task import models
from train.task.models import (
    CNN7,
    VGG16,
    BasicBlock,
    Bottleneck,
    DigitsCNN,
    ResNet20,
    ResNet50,
    max_pool_2x2,
)


@pytest.mark.parametrize(
    "model, shape, count",
    [
        (CNN7, (28, 28, 3), 351_946),
        (ResNet20, (28, 28, 3), 269_722),
        (ResNet20, (32, 32, 3), 269_722),
        (VGG16, (32, 32, 3), 15_253_578),
        (DigitsCNN, (8, 8, 1), 151_306),
        (ResNet50, (32, 32, 3), 25_557_032),
    ],
)
def test_parameters_and_logits(model, shape, count):
    x = jnp.zeros((2, *shape))
    init = lambda key: model().init(key, x, train=False)
    variables = jax.eval_shape(init, jax.random.key(0))
    logits = jax.eval_shape(lambda v: model().apply(v, x, train=False), variables)
    assert logits.shape == (2, 1000 if model is ResNet50 else 10)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == count


def test_a_resnet_shortcut_takes_every_other_pixel_and_pads_channels():
    block = BasicBlock(features=6, stride=2)
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (1, 4, 4, 2)), jnp.float32)
    variables = block.init(jax.random.key(0), x, train=False)
    # Without convolutions only the shortcut remains.
    zeros = jax.tree.map(jnp.zeros_like, variables["params"])
    y = block.apply({**variables, "params": zeros}, x, train=False)
    expected = np.zeros((1, 2, 2, 6), np.float32)
    expected[..., 2:4] = x[:, ::2, ::2]
    np.testing.assert_array_equal(y, expected)


def test_pooling_and_its_gradient_equal_those_of_flax():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 6, 3)), jnp.float32)
    flax_pool = lambda x: nn.max_pool(x, (2, 2), (2, 2))
    np.testing.assert_array_equal(max_pool_2x2(x), flax_pool(x))
    gradient = lambda pool: jax.grad(lambda x: (pool(x) ** 2).sum())(x)
    np.testing.assert_array_equal(gradient(max_pool_2x2), gradient(flax_pool))


def test_dropout_is_active_only_in_training():
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


def test_a_block_starts_as_the_identity():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 256)), jnp.float32)
    block = Bottleneck(64)
    variables = block.init(jax.random.key(0), x, False)
    np.testing.assert_array_equal(block.apply(variables, x, False), jnp.maximum(x, 0))
    assert "Conv_3" not in variables["params"]
    halved = Bottleneck(64, stride=2)
    variables = jax.eval_shape(lambda: halved.init(jax.random.key(0), x, False))
    shape = lambda name: variables["params"][name]["kernel"].shape
    assert shape("Conv_1") == (3, 3, 64, 64) and shape("Conv_3") == (1, 1, 256, 256)


@pytest.mark.parametrize(
    "stages", [((1, 8),), pytest.param(models.STAGES, marks=pytest.mark.slow)]
)
def test_resnet50_learns_from_a_batch(stages, monkeypatch):
    """Uses small images. The gradient reaches every parameter."""
    monkeypatch.setattr(models, "STAGES", stages)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    model, x, labels = ResNet50(3), draw(4, 32, 32, 3), jnp.array([0, 1, 2, 0])
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, train=False))
    # The initial values would take long to compile; these have their size.
    size = lambda leaf: np.sqrt(2 * leaf.shape[-1] / np.prod(leaf.shape))  # by the inputs
    value = lambda leaf: draw(*leaf.shape) * size(leaf) if leaf.ndim > 1 else 0.3
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, value(leaf)), shapes["params"])
    stats = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes["batch_stats"])

    @jax.jit
    def step(params):
        def loss_of(params):
            variables = {"params": params, "batch_stats": stats}
            logits, new = model.apply(variables, x, True, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), new["batch_stats"]

        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        rate = 0.01 * loss / optax.tree.norm(grads, squared=True)  # the loss falls by 1 %
        return loss, new, grads, optax.tree.add_scale(params, -rate, grads)

    loss, new, grads, moved = step(params)
    assert float(step(moved)[0]) == pytest.approx(0.99 * float(loss), rel=0.005)
    for leaf in jax.tree.leaves((grads, new)):
        assert np.isfinite(leaf).all() and jnp.abs(leaf).max() > 0
