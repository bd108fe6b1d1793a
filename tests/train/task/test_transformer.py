"""The transformer: size, causality, positions, types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.task.transformer import Transformer, rotated


def built(**options):
    small = dict(vocabulary=5, context=8, layers=2, heads=2, width=16) | options
    model = Transformer(**small)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 5)
    return model, jax.jit(model.init)(jax.random.key(0), tokens), tokens


def test_parameters_and_logits_of_the_reference():
    model = Transformer(vocabulary=65, context=64, layers=4, heads=4, width=128)
    tokens = jnp.zeros((2, 64), jnp.int32)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))
    # 12 width² and two norms per block; an embedding, a head and the last norm.
    expected = 4 * (12 * 128**2 + 2 * 128) + 2 * 65 * 128 + 128
    assert sum(x.size for x in jax.tree.leaves(variables)) == expected
    assert jax.eval_shape(model.apply, variables, tokens).shape == (2, 64, 65)


@pytest.mark.parametrize(
    "positions", ["rotary", pytest.param("learned", marks=pytest.mark.slow)]
)
def test_attention_is_causal_and_depends_on_positions(positions):
    model, variables, tokens = built(positions=positions)
    apply = jax.jit(model.apply)
    logits = apply(variables, tokens)
    other = tokens.at[:, 5].set((tokens[:, 5] + 1) % 5)
    changed = np.abs(apply(variables, other) - logits).max(axis=(0, 2))
    assert (changed[:5] < 1e-6).all() and (changed[5:] > 1e-5).all()
    # Another order of the same tokens changes the last logits.
    swapped = tokens.at[:, 0].set(tokens[:, 1]).at[:, 1].set(tokens[:, 0])
    swapped = jnp.where(tokens[:, :1] == tokens[:, 1:2], other, swapped)
    assert np.abs(apply(variables, swapped) - logits)[:, -1].max() > 1e-6
    # The input may be shorter than the context.
    fewer = apply(variables, tokens[:, :3])
    np.testing.assert_allclose(fewer, logits[:, :3], atol=1e-5)


def test_rotated_products_depend_only_on_the_distance():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    spread = lambda x: rotated(jnp.broadcast_to(x, (1, 6, 1, 8)))[0, :, 0]
    products = np.asarray(spread(q) @ spread(k).T)
    for distance in range(-5, 6):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert np.ptp(products[0]) > 0.1


def test_bfloat16_applies_to_activations_only():
    model, variables, tokens = built(dtype="bfloat16")
    exact, _, _ = built()
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    logits, expected = (jax.jit(m.apply)(variables, tokens) for m in (model, exact))
    assert logits.dtype == jnp.float32
    difference = np.abs(logits - expected).max()
    assert 0 < difference < 0.03 * np.abs(expected).max()
