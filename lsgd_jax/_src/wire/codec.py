"""Codec: trees as they travel in a wire format."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lsgd_jax._src.trees import Tree, finite_part, is_float, widened
from lsgd_jax._src.wire.packing import Packing
from lsgd_jax._src.wire.top_k import TopK
from lsgd_jax._src.wire.wire import Wire


Message = Any  # a tree of the arrays that travel


class Codec:
    """Encodes trees of one structure, packed into a few buffers.

    Small leaves lie side by side in one buffer, each from the start of a block on, so that
    no two share a scale; the zeros between them do not travel. Leaves of integers, of
    bools and of one element travel as they are: a code and its scale would be longer.
    Where leaves may be sharded each stays by itself, and keeps its shape. With 'top-k' the
    leaves of a buffer are of one size and form the rows of a matrix, encoded row by row.

    Args:
      tree: arrays.
      wire: the format.
      shards: for each leaf the mesh axes inside a worker over which it is sharded, as the
        devices of a worker round the same copies alike. Defaults to none.

    Attributes:
      coded: the number of buffers that are encoded; those behind travel as they are.
      shards: for each buffer the axes over which it is sharded.

    >>> import lsgd_jax as lj
    >>> codec = Codec(jnp.zeros(3), lj.Wire("int8"))
    >>> x = jnp.array([0.5, -1.0, 0.1])
    >>> message = codec.encode(x)
    >>> bool(jnp.allclose(codec.decode(message) + codec.error(x, message), x))
    True
    """

    def __init__(
        self,
        tree: Tree,
        wire: Wire | TopK,
        shards: Sequence[tuple[str, ...]] | None = None,
    ):
        leaves = jax.tree.leaves(tree)
        axes = shards or [()] * len(leaves)
        # With 'top-k' the leaves of a buffer are of one size.
        groups = [
            wire.is_narrow and is_coded(x) and (wire.is_sparse and x.size, names)
            for x, names in zip(leaves, axes, strict=True)
        ]
        self._wire: Any = wire
        self._packing = Packing(tree, groups, wire.align)
        firsts = [members[0] for members in self._packing.members]
        self.coded = sum(bool(groups[i]) for i in firsts)
        self.shards = [axes[i] for i in firsts]
        self._layouts = [wire.layout(self._packing, b) for b in range(self.coded)]
        self.pack = self._packing.pack
        self.unpack = self._packing.unpack

    def encode(self, tree: Tree, key: Array | None = None) -> Message:
        """The message for a tree.

        Args:
          tree: arrays of floats count as 0 where they are not finite.
          key: random key for stochastic rounding.
        """
        message, _ = self.round_buffers(self.pack(tree), key)
        return message

    def error(self, tree: Tree, message: Message) -> Tree:
        """The quantization error of a tree's message, in float32 where it was rounded."""
        arrived = self.decode_buffers(message)
        return self.unpack([widened(x) - q for x, q in zip(self.pack(tree), arrived)])

    def decode(self, message: Message) -> Tree:
        """The tree that arrives, in float32 where it was rounded."""
        return self.unpack(self.decode_buffers(message))

    # On the buffers that the tree lies in

    def round_buffers(
        self, buffers: list[Array], key: Array | None
    ) -> tuple[Message, list[Array]]:
        """The message for the buffers, and the buffers that arrive."""
        coded = buffers[: self.coded]
        plain = buffers[self.coded :]
        finite = list(map(finite_part, coded))
        keys = [self.key(key, b) for b in range(self.coded)]
        pairs = list(map(self._wire.rounded, finite, self._layouts, keys))
        return [sent for sent, _ in pairs] + plain, [q for _, q in pairs] + plain

    def decode_buffers(self, message: Message) -> list[Array]:
        """The buffers that arrive."""
        return list(map(self._wire.decode, message, self._layouts)) + message[self.coded :]

    def senders(self, message: Message) -> list[Array]:
        """Buffers of 1 for the entries that are in the message, of 0 for the others."""
        found = list(map(self._wire.senders, message, self._layouts))
        return found + list(map(jnp.ones_like, message[self.coded :]))

    def key(self, key: Array | None, b: int) -> Array | None:
        """The random key of a buffer, the same on all devices that hold the same shard."""
        if key is None:
            return None
        axes = self.shards[b]
        return folded(key, b, *([lax.axis_index(axes)] if axes else []))


def is_coded(leaf: Array) -> bool:
    """Whether a leaf is encoded in a narrow format."""
    return is_float(leaf) and leaf.size > 1


def draws(seed: int, *numbers: Any) -> Array:
    """Returns a random key from a seed and some numbers.

    Its generator is not jax's default one, which may be 'rbg': under `jax.vmap` that draws
    for all workers of a device with the key of the first.
    """
    return folded(jax.random.key(seed, impl="threefry2x32"), *numbers)


def folded(key: Array, *numbers: Any) -> Array:
    """Returns the key with the numbers folded in."""
    return functools.reduce(jax.random.fold_in, numbers, key)
