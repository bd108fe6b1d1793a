"""Small leaves of a tree side by side in a few flat buffers.

Every call of a collective has a fixed cost, and XLA compiles one kernel per leaf for each
operation on a tree. Both are cheaper on a few buffers.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

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

        def is_last(members):
            return not (groups and groups[members[0]])

        self.members = sorted(buffers.values(), key=is_last)
        self._starts = [0] * len(leaves)  # in their buffers
        for members in self.members:
            for i, after in itertools.pairwise(members):
                size = self._sizes[i]
                self._starts[after] = self._starts[i] + size + -size % align

    def pack(self, tree: Tree) -> list[Array]:
        """Returns the buffers of a tree."""
        leaves = jax.tree.leaves(tree)
        buffers = []
        for members in self.members:
            own = [leaves[i] for i in members]
            # A leaf that has a buffer of its own keeps its shape.
            is_alone = len(own) == 1
            flat = own[0] if is_alone else joined([x.ravel() for x in own], self._align)
            buffers.append(flat)
        return buffers

    def unpack(self, buffers: Sequence[Array], t: Array | None = None) -> Tree:
        """Returns the tree of the buffers.

        With t, a step count that is equal on all workers, one kernel takes all leaves of
        one shape, so that many leaves compile fast. Without t, packing the result again is
        free.
        """
        leaves: list[Any] = [None] * len(self._sizes)
        starts: Sequence[Any] = self._starts
        if t is not None and starts:
            # XLA compiles one kernel per constant start. It cannot know that t > 0.
            zeros = [jnp.int32(0)] * len(starts)
            starts = lax.cond(t > 0, lambda: list(map(jnp.int32, starts)), lambda: zeros)
        for buffer, members in zip(buffers, self.members, strict=True):
            for i in members:
                part = buffer
                start = starts[i]
                size = self._sizes[i]
                if len(members) > 1 and t is None:
                    part = lax.slice(buffer, [start], [start + size])
                elif len(members) > 1:
                    part = lax.dynamic_slice(
                        buffer, [start], [size], allow_negative_indices=False
                    )
                leaves[i] = part.reshape(self._shapes[i])
        return jax.tree.unflatten(self._treedef, leaves)

    def runs(self, b: int) -> list[tuple[int, int, int]]:
        """(index, start, size) of each leaf in a buffer."""
        return [(i, self._starts[i], self._sizes[i]) for i in self.members[b]]

    def shape(self, b: int) -> tuple[int, ...]:
        """The shape of a buffer."""
        (*_, (last, start, size)) = self.runs(b)
        if len(self.members[b]) == 1:
            return self._shapes[last]
        return (start + size + -size % self._align,)


def joined(runs: Sequence[Array], align: int = 1) -> Array:
    """Concatenates flat arrays, each padded with zeros to a multiple of align."""
    gaps = [jnp.zeros([-run.size % align], run.dtype) for run in runs]
    # Without an alignment the gaps are empty, and would only lengthen the program.
    pieces = [piece for piece in itertools.chain(*zip(runs, gaps)) if piece.size]
    return jnp.concatenate(pieces) if pieces else runs[0]


def is_large(shape: tuple[int, ...]) -> bool:
    """Whether a leaf is so large that it is never joined with others."""
    return math.prod(shape) > PACKED_BELOW


class Cut(NamedTuple):
    """How an array is cut into equal parts: along an axis, or flat with zeros at the end.

    Flattening would copy the array on accelerators, and so would a cut along the last axis.

    Attributes:
      shape: of the array.
      parts: their number.
      axis: the axis that is cut; None: the array is flattened.
      part: the shape of a part.

    >>> x = jnp.ones(3)
    >>> cut = Cut.of(x.shape, 2)
    >>> cut.rows(x)
    Array([[1., 1.],
           [1., 0.]], dtype=float32)
    >>> cut.array(cut.rows(x))
    Array([1., 1., 1.], dtype=float32)
    >>> Cut.of((3, 4, 5), 2).part
    (3, 2, 5)
    """

    shape: tuple[int, ...]
    parts: int
    axis: int | None
    part: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], parts: int) -> "Cut":
        """Along the first axis before the last that can be cut, otherwise flat."""
        for axis, n in enumerate(shape[:-1]):
            if n % parts == 0:
                part = *shape[:axis], n // parts, *shape[axis + 1 :]
                return cls(shape, parts, axis, part)
        return cls.flat(shape, parts)

    @classmethod
    def flat(cls, shape: tuple[int, ...], parts: int, block: int = 1) -> "Cut":
        """Flat parts, each a multiple of `block` elements."""
        blocks = -(-math.prod(shape) // (block * parts))
        return cls(shape, parts, None, (blocks * block,))

    def rows(self, x: Array) -> Array:
        """The parts of an array, [parts, ...]."""
        if self.axis is None:
            missing = self.parts * self.part[0] - x.size
            return jnp.pad(x.ravel(), (0, missing)).reshape(self.parts, -1)
        before = self.part[: self.axis]
        after = self.part[self.axis :]
        return jnp.moveaxis(x.reshape(*before, self.parts, *after), self.axis, 0)

    def array(self, rows: Array) -> Array:
        """The array of its parts."""
        if self.axis is None:
            return rows.ravel()[: math.prod(self.shape)].reshape(self.shape)
        return jnp.moveaxis(rows, 0, self.axis).reshape(self.shape)
