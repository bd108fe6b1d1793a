"""Small leaves of a tree side by side in a few flat buffers.

Every call of a collective has a fixed cost, and XLA compiles one kernel per leaf for each
operation on a tree. Both are cheaper on a few buffers.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lsgd_jax._src.layouts import may_be_sharded
from lsgd_jax._src.trees import Tree


# Larger leaves stay as they are, because copying them would cost more than it saves.
PACKED_BELOW = 2**17


class Packing:
    """Assigns the leaves of trees like this one to buffers.

    Args:
      tree: arrays; leaves share a buffer if they are small, of one dtype and of one group.
        Where arrays may be sharded, they stay as they are.
      groups: the group of each leaf; buffers of a group that is false come last. Defaults
        to one group for all leaves.
      align: leaves that share a buffer start at multiples of this, with zeros in between.

    Attributes:
      members: for each buffer the indices of its leaves.
      keeps_shapes: whether arrays may be sharded, so that no leaf is flattened.

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
        # Flattening a leaf that XLA has sharded would gather its shards.
        self.keeps_shapes = may_be_sharded()
        self._align = align
        buffers: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            group = groups[i] if groups else None
            stays = leaf.size > PACKED_BELOW or (self.keeps_shapes and leaf.ndim)
            alone = i if stays else None
            buffers.setdefault((leaf.dtype, group, alone), []).append(i)
        is_last = lambda members: not (groups and groups[members[0]])
        self.members = sorted(buffers.values(), key=is_last)

    def pack(self, tree: Tree) -> list[Array]:
        """Returns the buffers of a tree."""
        leaves = jax.tree.leaves(tree)
        return [self._join([leaves[i] for i in members]) for members in self.members]

    def unpack(self, buffers: Sequence[Array], t: Array | None = None) -> Tree:
        """Returns the tree of the buffers.

        With t, a step count that is equal on all workers, one kernel takes all leaves of
        one shape, so that many leaves compile fast. Without t, packing the result again is
        free.
        """
        leaves: list[Any] = [None] * len(self._sizes)
        starts = self._starts(t)
        for buffer, members in zip(buffers, self.members, strict=True):
            for i in members:
                part = buffer
                if len(members) > 1:
                    part = _run(buffer, starts[i], self._sizes[i])
                leaves[i] = part.reshape(self._shapes[i])
        return jax.tree.unflatten(self._treedef, leaves)

    def named(self, buffers: Sequence[Array]) -> Tree:
        """Returns the buffers as the packed tree if each is one leaf, otherwise a list."""
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

    def _starts(self, t: Array | None) -> dict[int, Any]:
        """Returns where each leaf begins in its buffer."""
        buffers = range(len(self.members))
        known = {i: start for b in buffers for i, start, _ in self.runs(b)}
        if t is None or not known:
            return known
        # XLA compiles one kernel per constant start. It cannot know that t > 0.
        zeros = dict.fromkeys(known, jnp.int32(0))
        return lax.cond(t > 0, lambda: jax.tree.map(jnp.int32, known), lambda: zeros)

    def _join(self, leaves: Sequence[Array]) -> Array:
        if len(leaves) == 1:  # a large leaf keeps its shape
            return leaves[0]
        return joined([leaf.ravel() for leaf in leaves], self._align)


def joined(runs: Sequence[Array], align: int = 1) -> Array:
    """Concatenates flat arrays, each padded with zeros to a multiple of align."""
    gaps = [jnp.zeros([-run.size % align], run.dtype) for run in runs]
    pieces = [piece for piece in itertools.chain(*zip(runs, gaps)) if piece.size]
    return jnp.concatenate(pieces) if pieces else runs[0]


def _run(buffer: Array, start: Any, size: int) -> Array:
    if isinstance(start, int):
        return lax.slice(buffer, [start], [start + size])
    return lax.dynamic_slice(buffer, [start], [size], allow_negative_indices=False)


def cut(x: Array, parts: int) -> Array:
    """x in equal parts, [parts, ...], with zeros at the end if it does not divide.

    >>> cut(jnp.ones(3), 2)
    Array([[1., 1.],
           [1., 0.]], dtype=float32)
    """
    if _divides(x.shape, parts):  # flattening would copy the array on accelerators
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])
    return jnp.pad(x.ravel(), (0, -x.size % parts)).reshape(parts, -1)


def uncut(rows: Array, shape: tuple[int, ...]) -> Array:
    """The array of that shape of which `cut` made the rows.

    >>> uncut(cut(jnp.ones(3), 2), (3,))
    Array([1., 1., 1.], dtype=float32)
    """
    if _divides(shape, len(rows)):
        return rows.reshape(shape)
    return rows.ravel()[: math.prod(shape)].reshape(shape)


def _divides(shape: tuple[int, ...], parts: int) -> bool:
    return bool(shape) and shape[0] % parts == 0
