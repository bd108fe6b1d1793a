"""Small leaves of a tree side by side in a few flat buffers.

A collective costs by the call, and XLA compiles a kernel per leaf for each thing that is
done to a tree: both are better done to a few buffers.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax.trees import Tree


# Leaves of more elements stay as they are: copying them takes longer than what it saves.
PACKED_BELOW = 2**20


class Packing:
    """Which leaves of trees like this one lie in which buffer.

    Args:
      tree: arrays; leaves share a buffer if they are small, of one dtype and of one group.
      groups: of each leaf its group; None: all are of one.

    Attributes:
      members: of each buffer the indices of its leaves.

    >>> packing = Packing({"a": jnp.ones(2), "b": jnp.zeros([1, 3])})
    >>> packing.pack({"a": jnp.ones(2), "b": jnp.zeros([1, 3])})
    [Array([1., 1., 0., 0., 0.], dtype=float32)]
    """

    def __init__(self, tree: Tree, groups: Sequence[Hashable] | None = None):
        leaves, self._treedef = jax.tree.flatten(tree)
        self._shapes = [leaf.shape for leaf in leaves]
        self._sizes = [leaf.size for leaf in leaves]
        buffers: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            group = groups[i] if groups else None
            alone = i if leaf.size > PACKED_BELOW else None
            buffers.setdefault((leaf.dtype, group, alone), []).append(i)
        self.members = list(buffers.values())

    def pack(self, tree: Tree, chosen: Iterable[int] | None = None) -> list[Array]:
        """The buffers of a tree of the same shapes; of one with fewer leaves those chosen."""
        chosen = range(len(self.members)) if chosen is None else list(chosen)
        present = sorted(i for buffer in chosen for i in self.members[buffer])
        leaves = dict(zip(present, jax.tree.leaves(tree), strict=True))
        return [self._join([leaves[i] for i in self.members[b]]) for b in chosen]

    def unpack(self, buffers: Sequence[Array], chosen: Iterable[int] | None = None) -> Tree:
        """The tree of the buffers; with only some of them, the other leaves are empty."""
        leaves: list[Any] = [optax.MaskedNode()] * len(self._sizes)
        chosen = range(len(self.members)) if chosen is None else chosen
        for buffer, b in zip(buffers, chosen, strict=True):
            members = self.members[b]
            ends = [
                sum(self._sizes[i] for i in members[: k + 1]) for k in range(len(members))
            ]
            parts = jnp.split(buffer, ends[:-1]) if len(members) > 1 else [buffer]
            for i, part in zip(members, parts):
                leaves[i] = part.reshape(self._shapes[i])
        return jax.tree.unflatten(self._treedef, leaves)

    def _join(self, leaves: Sequence[Array]) -> Array:
        if len(leaves) == 1:  # a large leaf keeps its shape
            return leaves[0]
        return jnp.concatenate([leaf.ravel() for leaf in leaves])
