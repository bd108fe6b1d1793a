"""A decoder-only transformer, as a Flax linen module: tokens [B, T] -> logits [B, T, V]."""

import functools
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


STD = 0.02  # standard deviation of the initial parameters (Radford et al., 2019)


def rotated(x: Array) -> Array:
    r"""Rotates vectors [B, T, heads, d] by their positions.

    The pair (x_i, x_{i + d/2}) at position t is rotated by :math:`t \, 10000^{-2i/d}`. The
    product of two vectors then depends only on the distance between their positions.

    Reference: Su et al., RoFormer, arXiv:2104.09864.

    >>> rotated(jnp.ones((1, 2, 1, 2))).round(3).squeeze().tolist()
    [[1.0, 1.0], [-0.301, 1.382]]
    """
    length, half = x.shape[1], x.shape[-1] // 2
    frequencies = 10_000 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies[None]
    cos, sin = (f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x)), with causal attention."""

    heads: int
    rotary: bool
    out_std: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Array) -> Array:
        batch, length, width = x.shape
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        dense = functools.partial(
            nn.Dense,
            use_bias=False,
            dtype=self.dtype,
            kernel_init=nn.initializers.normal(STD),
        )
        out = functools.partial(dense, kernel_init=nn.initializers.normal(self.out_std))
        qkv = dense(3 * width, name="qkv")(norm(name="attention_norm")(x))
        qkv = qkv.reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, :, i] for i in range(3))
        if self.rotary:
            q, k = rotated(q), rotated(k)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + out(width, name="attention_out")(mixed.reshape(x.shape))
        hidden = nn.gelu(dense(4 * width, name="up")(norm(name="perceptron_norm")(x)))
        return x + out(width, name="down")(hidden)


class Transformer(nn.Module):
    """A transformer: embedding, blocks, and a projection to the logits of the next token.

    As in GPT-2, the perceptron has four times the width and GELU. Norms are RMS norms, and
    there are neither biases nor dropout. Parameters and logits are float32.

    Attributes:
      vocabulary: V, the number of tokens.
      context: the maximum number of tokens that the model sees.
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    positions: Literal["rotary", "learned"] = "rotary"
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        normal = nn.initializers.normal
        embed = functools.partial(
            nn.Embed, features=self.width, dtype=self.dtype, embedding_init=normal(STD)
        )
        x = embed(self.vocabulary, name="tokens")(tokens)
        if self.positions == "learned":
            places = jnp.arange(tokens.shape[1])
            x = x + embed(self.context, name="positions")(places)[None]
        block = functools.partial(
            Block,
            heads=self.heads,
            rotary=self.positions == "rotary",
            # Each block adds two outputs to the residual stream.
            out_std=STD / (2 * self.layers) ** 0.5,
            dtype=self.dtype,
        )
        for i in range(self.layers):
            x = block(name=f"block{i}")(x)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        head = nn.Dense(
            self.vocabulary, use_bias=False, kernel_init=normal(STD), name="head"
        )
        return head(x.astype(jnp.float32))
