"""Shares: each worker computes on 1/W of the coordinates of all W workers.

Gathering the trees of W workers takes W times the memory of one. An all-to-all takes that
of one: it gives worker i the i-th share of the coordinates, of all workers. A gather of the
results then gives every worker all coordinates. Between asynchronous workers, which only
gather, a share is everything.
"""

import contextlib
import contextvars
from collections.abc import Hashable, Sequence
from typing import Any

from jax import Array, lax

from lsgd_jax._src.shared import during
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.packing import Cut, Packing


_FORWARD: contextvars.ContextVar[Array | None] = contextvars.ContextVar(
    "forward", default=None
)


def beside_a_gradient(loss: Array | None) -> contextlib.AbstractContextManager[None]:
    """Declares that messages in the `with` block travel beside the gradient of a loss."""
    return during(_FORWARD, loss)


def second_round(arrived: Tree) -> Tree:
    """What the first of two rounds of messages brought, for the second one.

    XLA would hide the second round behind the whole gradient, and wait for the first one.
    If the second round also waits for the loss, the first one travels beside the forward
    pass, and the second one beside the backward pass.
    """
    loss = _FORWARD.get()
    if loss is None:
        return arrived
    return lax.optimization_barrier((arrived, loss))[0]


class Shares:
    """The trees of a group's workers, cut by coordinates.

    Args:
      group: the workers.
      tree: the tree of this worker, as its devices see it.
      of: the group of each leaf, as for `Packing`.

    Attributes:
      packing: how the tree lies in buffers.
    """

    def __init__(self, group: Any, tree: Tree, of: Sequence[Hashable] | None = None):
        self._group = group
        self._is_cut = group.channel.transposes
        self.packing = Packing(tree, of)

    def rows(self, tree: Tree) -> list[Array]:
        """For each buffer this worker's share of all workers' values, [W, ...]."""
        buffers = self.packing.pack(tree)
        if not self._is_cut:
            return self._group.gather(buffers)  # one message of all buffers
        group = self._group
        rows = [Cut.of(x.shape, group.size).rows(x) for x in buffers]
        return second_round(group.transpose(rows))

    def join(self, shares: Sequence[Array]) -> Tree:
        """The tree of all workers' shares, one for each buffer, [...]."""
        # Parts of a buffer cannot tell its shape, because they may be padded.
        if not self._is_cut:
            return self.packing.unpack(shares)
        group = self._group
        shapes = map(self.packing.shape, range(len(self.packing.members)))
        rows = group.gather(list(shares))
        cuts = [Cut.of(shape, group.size) for shape in shapes]
        return self.packing.unpack([cut.array(x) for cut, x in zip(cuts, rows)])

    def total(self, partial: Array, times: int = 1) -> Array:
        """The sum over the workers' shares; in a loop of `times` iterations."""
        return self._group.add(partial, times) if self._is_cut else partial
