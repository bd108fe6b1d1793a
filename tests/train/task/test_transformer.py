"""The transformers: size, causality, padding, positions, types."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.data.translation import END, PAD
from train.task.transformer import EncoderDecoder, Transformer, rotated


@functools.cache
def built(**options):
    small = dict(vocabulary=5, context=8, layers=1, heads=2, width=16) | options
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


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rotary", "learned"])
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


@pytest.mark.slow
def test_rotated_products_depend_only_on_the_distance():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    spread = lambda x: rotated(jnp.broadcast_to(x, (1, 6, 1, 8)))[0, :, 0]
    products = np.asarray(spread(q) @ spread(k).T)
    for distance in range(-5, 6):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert np.ptp(products[0]) > 0.1


@pytest.mark.slow
def test_bfloat16_applies_to_activations_only():
    exact, variables, tokens = built()
    model = exact.clone(dtype="bfloat16")
    kept = jax.eval_shape(model.init, jax.random.key(0), tokens)
    assert {x.dtype for x in jax.tree.leaves(kept)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    logits, expected = (jax.jit(m.apply)(variables, tokens) for m in (model, exact))
    assert logits.dtype == jnp.float32
    difference = np.abs(logits - expected).max()
    assert 0 < difference < 0.03 * np.abs(expected).max()


@functools.cache
def translating(positions="rotary"):
    """A network, its variables, sentences of 6 and 4 tokens, and the logits."""
    model = EncoderDecoder(9, 8, layers=1, heads=2, width=16, positions=positions)
    source = np.array([[3, 4, 5, 6, 7, END], [8, 7, 3, END, PAD, PAD]])
    target = np.array([[5, 5, 6, END, PAD, PAD], [3, 8, 8, 4, 7, END]])
    variables = jax.jit(model.init)(jax.random.key(0), source, target)
    apply = jax.jit(lambda *pair: model.apply(variables, *pair))
    return model, apply, variables, source, target, apply(source, target)


def test_parameters_of_an_encoder_and_a_decoder():
    _, _, variables, *_ = translating()
    # 12 width² and two norms per block, 16 and three with attention to the source; an
    # embedding that all share, and two last norms.
    expected = (12 * 16**2 + 2 * 16) + (16 * 16**2 + 3 * 16) + 9 * 16 + 2 * 16
    assert sum(x.size for x in jax.tree.leaves(variables)) == expected


def test_a_token_depends_on_the_source_and_on_earlier_tokens():
    _, apply, _, source, target, logits = translating()
    other = target.copy()
    other[:, 2] = 7
    changed = np.abs(apply(source, other) - logits).max(axis=2)
    assert (changed[:, :3] < 1e-6).all() and (changed[:, 3:] > 1e-5).all()
    for place in (0, 3):  # the encoder sees the whole source
        other = source.copy()
        other[:, place] = 1
        assert (np.abs(apply(other, target) - logits).max(axis=2) > 1e-5).all()


@pytest.mark.slow
def test_padding_changes_no_logits():
    _, apply, _, source, target, logits = translating()
    more = (np.pad(x, ((0, 0), (0, 2)), constant_values=PAD) for x in (source, target))
    np.testing.assert_allclose(apply(*more)[:, :6], logits, atol=1e-5)
    alone = apply(source[1:, :4], target[1:])
    np.testing.assert_allclose(alone[0], logits[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_one_token_after_the_other_gives_the_same_logits(positions):
    """With keys and values of earlier tokens in a cache."""
    model, _, variables, source, target, logits = translating(positions)

    @jax.jit
    def step(cache, last, at):
        encoded = model.apply(variables, source, method="encode")
        given = variables | cache, last[:, None], encoded, at
        return model.apply(*given, method="decode", mutable="cache")

    cache, last = {}, jnp.full(2, END)
    for at in range(6):
        found, cache = step(cache, last, jnp.int32(at))
        np.testing.assert_allclose(found[:, 0], logits[:, at], atol=1e-5)
        last = jnp.asarray(target[:, at])
