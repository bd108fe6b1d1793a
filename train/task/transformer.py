"""Transformers as Flax linen modules: a decoder, and an encoder with a decoder."""

import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from train.data.translation import END, PAD


STD = 0.02  # standard deviation of the initial parameters (Radford et al., 2019)


def rotated(x: Array, at: Array | None = None) -> Array:
    r"""Rotates vectors [B, T, heads, d] by their positions, which are `at`, or 0, 1, …

    The pair (x_i, x_{i + d/2}) at position t is rotated by :math:`t \, 10000^{-2i/d}`. The
    product of two vectors then depends only on the distance between their positions.

    Reference: Su et al., RoFormer, arXiv:2104.09864.

    >>> rotated(jnp.ones((1, 2, 1, 2))).round(3).squeeze().tolist()
    [[1.0, 1.0], [-0.301, 1.382]]
    """
    length = x.shape[1]
    half = x.shape[-1] // 2
    frequencies = 10_000 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    places = jnp.arange(length, dtype=jnp.float32) if at is None else at[None]
    angles = places[:, None] * frequencies[None]
    cos, sin = (f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x)).

    With a source, x + attention(norm(x), source) comes between the two.

    Attributes:
      causal: whether a position attends only to itself and to earlier ones.
      context: the maximum number of positions, for calls with `at`.
    """

    heads: int
    rotary: bool
    out_std: float
    dtype: DTypeLike
    causal: bool = True
    context: int = 0

    @nn.compact
    def __call__(
        self,
        x: Array,
        lengths: Array | None = None,
        source: tuple[Array, Array] | None = None,
        at: Array | None = None,
    ) -> Array:
        """Applies the block: [B, T, width] -> [B, T, width].

        Args:
          x: the vectors.
          lengths: the number of positions to attend to, [B]. Defaults to all.
          source: the encoded source [B, S, width] and its lengths [B].
          at: the position of x, which is a single one then. Keys and values of earlier
            positions, and of the source, are in the collection 'cache'.
        """
        width = x.shape[-1]
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        dense = functools.partial(
            nn.Dense,
            use_bias=False,
            dtype=self.dtype,
            kernel_init=nn.initializers.normal(STD),
        )
        out = functools.partial(dense, kernel_init=nn.initializers.normal(self.out_std))
        attend = jax.nn.dot_product_attention

        def heads(x: Array, parts: int) -> list[Array]:
            x = x.reshape(*x.shape[:2], parts, self.heads, width // self.heads)
            return [x[:, :, i] for i in range(parts)]

        q, k, v = heads(dense(3 * width, name="qkv")(norm(name="attention_norm")(x)), 3)
        if self.rotary:
            q = rotated(q, at)
            k = rotated(k, at)
        if at is not None:
            k = self._with_earlier("key", k, at)
            v = self._with_earlier("value", v, at)
            lengths = jnp.full(len(x), at + 1)
        is_causal = self.causal and at is None
        mixed = attend(q, k, v, is_causal=is_causal, key_value_seq_lengths=lengths)
        x = x + out(width, name="attention_out")(mixed.reshape(x.shape))
        if source is not None:
            encoded, lengths = source
            (q,) = heads(dense(width, name="cross_q")(norm(name="cross_norm")(x)), 1)

            def project():
                return heads(dense(2 * width, name="cross_kv")(encoded), 2)

            once = at is not None
            k, v = self.variable("cache", "source", project).value if once else project()
            mixed = attend(q, k, v, key_value_seq_lengths=lengths)
            x = x + out(width, name="cross_out")(mixed.reshape(x.shape))
        hidden = nn.gelu(dense(4 * width, name="up")(norm(name="perceptron_norm")(x)))
        return x + out(width, name="down")(hidden)

    def _with_earlier(self, name: str, x: Array, at: Array) -> Array:
        """Adds keys or values of a position to those of earlier ones: [B, context, ...]."""
        shape = (len(x), self.context, *x.shape[2:])
        kept = self.variable("cache", name, jnp.zeros, shape, x.dtype)
        kept.value = jax.lax.dynamic_update_slice_in_dim(kept.value, x, at, axis=1)
        return kept.value


def stacked(
    net: "TransformerBase",
    x: Array,
    lengths: Array | None = None,
    source: tuple[Array, Array] | None = None,
    at: Array | None = None,
    causal: bool = True,
) -> Array:
    """Positions, the blocks of a network, and a norm: [B, T, width] -> [B, T, width].

    Args:
      net: the network that the parameters belong to, and whose sizes count.
      x: embedded tokens.
      lengths, source, at: see `Block.__call__`.
      causal: see `Block`.
    """
    if net.positions == "learned":
        places = jnp.arange(x.shape[1]) if at is None else at[None]
        x = x + embedding(net, net.context, name="positions")(places)[None]
    block = functools.partial(
        Block,
        heads=net.heads,
        rotary=net.positions == "rotary",
        # Each block adds two outputs, or three, to the residual stream.
        out_std=STD / ((2 if source is None else 3) * net.layers) ** 0.5,
        dtype=net.dtype,
        causal=causal,
        context=net.context,
    )
    for i in range(net.layers):
        x = block(name=f"block{i}")(x, lengths, source, at)
    return nn.RMSNorm(dtype=net.dtype, name="norm")(x)


def embedding(net: "TransformerBase", count: int, name: str | None = None) -> nn.Embed:
    """A vector of the network's width for each of `count` numbers."""
    init = nn.initializers.normal(STD)
    return nn.Embed(count, net.width, dtype=net.dtype, embedding_init=init, name=name)


class TransformerBase(nn.Module):
    """The sizes of a network of blocks.

    Attributes:
      vocabulary: V, the number of tokens.
      context: the maximum number of tokens that the network sees, or of a sentence with its
        end.
      layers: number of blocks, or of those of an encoder and of its decoder.
      heads, width, positions, dtype: see `train.config.TransformerConfig`.
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    positions: Literal["rotary", "learned"] = "rotary"
    dtype: DTypeLike = "float32"


class Transformer(TransformerBase):
    """Predicts the next token: tokens [B, T] -> logits [B, T, V].

    It consists of an embedding, blocks, and a projection to the logits. As in GPT-2, the
    perceptron has four times the width and GELU. Norms are RMS norms, and there are neither
    biases nor dropout. Parameters and logits are float32.
    """

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = stacked(self, embedding(self, self.vocabulary, name="tokens")(tokens))
        init = nn.initializers.normal(STD)
        head = nn.Dense(self.vocabulary, use_bias=False, kernel_init=init, name="head")
        return head(x.astype(jnp.float32))


class Side(TransformerBase):
    """The encoder or the decoder of a translation. For the call see `stacked`."""

    @nn.compact
    def __call__(self, x: Array, *given: Any, **named: Any) -> Array:
        return stacked(self, x, *given, **named)


class EncoderDecoder(TransformerBase):
    """Translates: (source [B, S], target [B, T]) -> logits [B, T, V] of the target.

    The logits of a token depend on the whole source and on earlier tokens of the target.
    Sentences end with END, and PAD fills them up. Both languages and the projection to the
    logits share one embedding. The blocks are those of `Transformer`; a block of the
    decoder also attends to the encoded source.

    Source: Vaswani et al., Attention is all you need, NeurIPS 2017, with the norms in front
    of the layers. Shared embedding: Press and Wolf, EACL 2017.
    """

    def setup(self) -> None:
        self.tokens = embedding(self, self.vocabulary)
        sizes = self.vocabulary, self.context, self.layers, self.heads, self.width
        self.encoder = Side(*sizes, self.positions, self.dtype)
        self.decoder = Side(*sizes, self.positions, self.dtype)

    def __call__(self, source: Array, target: Array) -> Array:
        before = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=END)
        return self.decode(before, self.encode(source))

    def encode(self, source: Array) -> tuple[Array, Array]:
        """The encoded source [B, S, width] and its lengths [B]."""
        lengths = (source != PAD).sum(axis=1, dtype=jnp.int32)
        return self.encoder(self.tokens(source), lengths, causal=False), lengths

    def decode(
        self, before: Array, source: tuple[Array, Array], at: Array | None = None
    ) -> Array:
        """The logits of the tokens that follow `before`, [B, T, V].

        Args:
          before: END and earlier tokens of the target, [B, T].
          source: the result of `encode`.
          at: see `Block.__call__`.
        """
        x = self.decoder(self.tokens(before), source=source, at=at)
        return x.astype(jnp.float32) @ self.tokens.embedding.T
