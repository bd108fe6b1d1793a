"""Small leaves of a tree side by side in a few flat buffers.

A collective costs by the call, and XLA compiles a kernel per leaf for each thing that is
done to a tree: both are better done to a few buffers.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from lsgd_jax._src.layouts import may_be_sharded
from lsgd_jax._src.trees import Tree


# Leaves of more elements stay as they are: copying them takes longer than what it saves.
PACKED_BELOW = 2**17


class Packing:
    """Which leaves of trees like this one lie in which buffer.

    Args:
      tree: arrays; leaves share a buffer if they are small, of one dtype and of one group.
        Where arrays may be sharded, they stay as they are.
      groups: of each leaf its group; None: all are of one.
      align: leaves that share a buffer start at multiples of this, with zeros in between.

    Attributes:
      members: of each buffer the indices of its leaves.

    >>> import jax.numpy as jnp
    >>> from lsgd_jax._src.layouts import on_one_device
    >>> with on_one_device():
    ...     packing = Packing({"a": jnp.ones(2), "b": jnp.zeros([1, 3])})
    >>> packing.pack({"a": jnp.ones(2), "b": jnp.zeros([1, 3])})
    [Array([1., 1., 0., 0., 0.], dtype=float32)]
    """

    def __init__(
        self, tree: Tree, groups: Sequence[Hashable] | None = None, align: int = 1
    ):
        leaves, self._treedef = jax.tree.flatten(tree)
        self._shapes = [leaf.shape for leaf in leaves]
        self._sizes = [leaf.size for leaf in leaves]
        # Where XLA shards leaves as it sees fit, flattening one would gather its shards.
        whole = may_be_sharded()
        self._align = align
        buffers: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            group = groups[i] if groups else None
            alone = i if leaf.size > PACKED_BELOW or (whole and leaf.ndim) else None
            buffers.setdefault((leaf.dtype, group, alone), []).append(i)
        self.members = list(buffers.values())

    def pack(self, tree: Tree, chosen: Iterable[int] | None = None) -> list[Array]:
        """The buffers of a tree of the same shapes; of a part of it those chosen."""
        chosen = range(len(self.members)) if chosen is None else list(chosen)
        present = sorted(i for buffer in chosen for i in self.members[buffer])
        leaves = dict(zip(present, jax.tree.leaves(tree), strict=True))
        return [self._join([leaves[i] for i in self.members[b]]) for b in chosen]

    def unpack(
        self,
        buffers: Sequence[Array],
        chosen: Iterable[int] | None = None,
        t: Array | None = None,
    ) -> Tree:
        """The tree of the buffers; with only some of them, the other leaves are empty.

        With t, a step count that is the same on all workers, leaves of one shape are taken
        by one kernel, so that many of them compile fast. Without, packing again is free.
        """
        leaves: list[Any] = [optax.MaskedNode()] * len(self._sizes)
        chosen = list(range(len(self.members)) if chosen is None else chosen)
        starts = self._starts(chosen, t)
        for buffer, b in zip(buffers, chosen, strict=True):
            for i in self.members[b]:
                part = buffer
                if len(self.members[b]) > 1:
                    part = _run(buffer, starts[i], self._sizes[i])
                leaves[i] = part.reshape(self._shapes[i])
        return jax.tree.unflatten(self._treedef, leaves)

    def named(self, buffers: Sequence[Array]) -> Tree:
        """The buffers, in the tree that they come from if each of them is one leaf."""
        return self.unpack(buffers) if len(buffers) == len(self._sizes) else buffers

    def runs(self, b: int) -> list[tuple[int, int, int]]:
        """(index, start, size) of each leaf in a buffer."""
        members = self.members[b]
        sizes = [self._sizes[i] for i in members]
        ends = itertools.accumulate(size + -size % self._align for size in sizes)
        return list(zip(members, [0, *ends], sizes))

    def shape(self, b: int) -> tuple[int, ...]:
        """The shape of a buffer."""
        (*_, (last, start, size)) = self.runs(b)
        if len(self.members[b]) == 1:
            return self._shapes[last]
        return (start + size + -size % self._align,)

    def _starts(self, chosen: list[int], t: Array | None) -> dict[int, Any]:
        """Where each leaf begins in its buffer."""
        known = {i: start for b in chosen for i, start, _ in self.runs(b)}
        if t is None or not known:
            return known
        # XLA compiles a kernel for every constant, but it does not know that t > 0.
        zeros = dict.fromkeys(known, jnp.int32(0))
        return lax.cond(t > 0, lambda: jax.tree.map(jnp.int32, known), lambda: zeros)

    def _join(self, leaves: Sequence[Array]) -> Array:
        if len(leaves) == 1:  # a large leaf keeps its shape
            return leaves[0]
        return joined([leaf.ravel() for leaf in leaves], self._align)


def joined(runs: Sequence[Array], align: int = 1) -> Array:
    """Flat arrays one after the other, each followed by zeros up to a multiple of align."""
    gaps = [jnp.zeros([-run.size % align], run.dtype) for run in runs]
    pieces = itertools.chain(*zip(runs, gaps))
    return jnp.concatenate([piece for piece in pieces if piece.size])


def _run(buffer: Array, start: Any, size: int) -> Array:
    if isinstance(start, int):
        return lax.slice(buffer, [start], [start + size])
    return lax.dynamic_slice(buffer, [start], [size], allow_negative_indices=False)
