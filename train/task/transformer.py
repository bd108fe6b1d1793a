"""A decoder-only transformer, as a Flax linen module: tokens [B, T] -> logits [B, T, V]."""

import functools
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


STD = 0.02  # of the parameters at the start (Radford et al., 2019)


def rotated(x: Array) -> Array:
    r"""Vectors [B, T, heads, d], rotated by their positions.

    The pair (x_i, x_{i + d/2}) of position t turns by the angle :math:`t \, 10000^{-2i/d}`,
    so that the product of two vectors depends on the distance of their positions only.

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
    """x + attention(norm(x)), then + perceptron(norm(x)); a token sees those before it."""

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
    """Blocks between an embedding and a projection to the logits of the next token.

    The sizes are those of GPT-2 (a perceptron of four times the width, GELU). Norms are RMS
    norms; there are neither biases nor dropout. Parameters and logits are float32.

    Attributes:
      vocabulary: V, how many tokens there are.
      context: the most tokens that it sees.
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
            # So many outputs are summed up in the end.
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
