"""Networks: sizes, blocks, and the pooling that replaces `nn.max_pool`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_pooling_and_its_gradient_equal_those_of_flax():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 6, 3)), jnp.float32)
    flax_pool = lambda x: nn.max_pool(x, (2, 2), (2, 2))
    np.testing.assert_array_equal(max_pool_2x2(x), flax_pool(x))
    gradient = lambda pool: jax.grad(lambda x: (pool(x) ** 2).sum())(x)
    np.testing.assert_array_equal(gradient(max_pool_2x2), gradient(flax_pool))


@pytest.mark.slow
def test_dropout_is_active_only_in_training():
    x = jnp.ones((1, 8, 8, 1))
    model = DigitsCNN()
    variables = jax.jit(lambda: model.init(jax.random.key(0), x, train=False))()

    @functools.partial(jax.jit, static_argnums=1)
    def logits(key, train):
        return model.apply(variables, x, train, rngs={"dropout": key})

    first, second = jax.random.split(jax.random.key(1))
    assert not np.array_equal(logits(first, True), logits(second, True))
    np.testing.assert_array_equal(logits(first, False), logits(second, False))


@pytest.mark.slow
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
