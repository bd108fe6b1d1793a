"""ResNet50: its size, its blocks, and that all of it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.task import resnet50
from train.task.resnet50 import Bottleneck, ResNet50


@pytest.mark.parametrize("classes", [1000, 3])
def test_resnet50_has_its_published_size(classes):
    model, x = ResNet50(classes), jnp.zeros((2, 32, 32, 3))
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), x, train=False))
    count = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    assert count == 25_557_032 - 2049 * (1000 - classes)
    stages = [
        variables["params"][f"Bottleneck_{i}"]["Conv_2"]["kernel"].shape[-1]
        for i in (0, 2, 3, 6, 7, 12, 13, 15)
    ]
    assert stages == [256, 256, 512, 512, 1024, 1024, 2048, 2048]
    apply = lambda variables: model.apply(variables, x, True, mutable=["batch_stats"])
    logits, stats = jax.eval_shape(apply, variables)
    assert logits.shape == (2, classes)
    assert sum(leaf.size for leaf in jax.tree.leaves(stats)) == 53_120


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
    "stages", [((1, 8),), pytest.param(resnet50.STAGES, marks=pytest.mark.slow)]
)
def test_resnet50_learns_from_a_batch(stages, monkeypatch):
    """On small images; the gradient reaches every parameter."""
    monkeypatch.setattr(resnet50, "STAGES", stages)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    model, x, labels = ResNet50(3), draw(4, 32, 32, 3), jnp.array([0, 1, 2, 0])
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, train=False))
    # Not the initial values, whose compilation takes long, but of their size.
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
