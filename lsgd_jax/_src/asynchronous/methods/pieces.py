"""Delayed Nesterov on pieces of an anchor, whose state passes from worker to worker."""

import dataclasses
import math
import operator
import zlib
from typing import NamedTuple

import jax
import numpy as np

from lsgd_jax._src.asynchronous.engine.contents import combined
from lsgd_jax._src.trees import Tree


PIECES = 8
SMALLEST = 1024  # elements of a piece, where there are several

Piece = list[np.ndarray]  # ranges of some leaves, each [n]
# The turn of a renewal, and a checksum of all sums so far: a worker that has failed may
# take its last turn again, with another sum.
Renewal = tuple[int, int]
Renewals = tuple[Renewal, Renewal, Renewal]
NONE: Renewal = (-1, 0)


class PieceState(NamedTuple):
    """The outer state of a piece. Its anchor is a = b - η s / N.

    Attributes:
      renewals: the last three renewals of the momentum, the newest one last; `NONE` where
        there was none, (0, 0) for the start.
      base: b, the anchor after the last renewal.
      momentum: m, as it was renewed then.
      total: s, the sum of the pseudo-gradients since then.
    """

    renewals: Renewals
    base: Piece
    momentum: Piece
    total: Piece


@dataclasses.dataclass(frozen=True)
class DelayedNesterov:
    r"""SGD whose Nesterov momentum is renewed and applied on every N-th turn t = 1, 2, ….

    .. math::
      s &\leftarrow s + g \\
      m &\leftarrow \beta m + s / N, \quad s \leftarrow 0 && \text{if } t \bmod N = 0 \\
      a &\leftarrow a - \eta \, (g / N + \beta m \, [t \bmod N = 0])

    Between two renewals a + η s / N = b does not change. So the sum s is all that one turn
    has to know of the turns before it, and with the last sum of a period every worker
    renews b and m by itself:

    .. math:: b \leftarrow b - \eta \, (s / N + \beta m).

    Args:
      learning_rate, momentum, every: η, β, N.

    Reference: Liu et al., Asynchronous Local-SGD Training for Language Modeling, 2024,
    arXiv:2401.09135.

    >>> outer = DelayedNesterov(learning_rate=0.5, momentum=0.5, every=1)
    >>> state = outer.init([np.float32([8])])
    >>> outer.anchor(outer.added(state, [np.float32([4])]))
    [array([6.], dtype=float32)]
    >>> outer.anchor(outer.renewed(outer.added(state, [np.float32([4])]), turn=1))
    [array([5.], dtype=float32)]
    """

    learning_rate: float
    momentum: float
    every: int

    def init(self, anchor: Piece) -> PieceState:
        """Returns the state at the start."""
        zeros = combined(np.zeros_like, anchor)
        return PieceState((NONE, NONE, (0, 0)), anchor, zeros, zeros)

    def anchor(self, state: PieceState) -> Piece:
        """Returns the anchor a."""
        rate = self.learning_rate / self.every
        return combined(lambda b, s: b - rate * s, state.base, state.total)

    def added(self, state: PieceState, gradient: Piece) -> PieceState:
        """Returns the state after a pseudo-gradient."""
        return state._replace(total=combined(operator.add, state.total, gradient))

    def renewed(self, state: PieceState, turn: int) -> PieceState:
        """Returns the state after the renewal of the momentum that is due at a turn."""
        _, second, newest = state.renewals
        rate = self.learning_rate
        decay = self.momentum

        def renew(m, s):
            return decay * m + s / self.every

        def move(b, m, s):
            return b - rate * (s / self.every + decay * m)

        momentum = combined(renew, state.momentum, state.total)
        return PieceState(
            renewals=(second, newest, (turn, _checksum(state.total, newest[1]))),
            base=combined(move, state.base, momentum, state.total),
            momentum=momentum,
            total=combined(np.zeros_like, state.total),
        )


def _checksum(piece: Piece, before: int) -> int:
    """Returns a checksum of a piece and of what was before it, 31 bits."""
    for part in piece:
        before = zlib.crc32(np.ascontiguousarray(part).view(np.uint8).data, before)
    return before >> 1


class Pieces:
    """Cuts trees of one structure into pieces of equal size, and joins them again.

    Args:
      tree: of arrays in the host's memory.

    >>> tree = {"a": np.zeros([30, 50]), "b": np.ones(1000)}
    >>> pieces = Pieces(tree)
    >>> [[part.size for part in piece] for piece in pieces.of(tree)]
    [[1250], [250, 1000]]
    >>> pieces.joined(pieces.of(tree))["b"].shape
    (1000,)
    """

    def __init__(self, tree: Tree):
        self._like = tree
        sizes = [x.size for x in jax.tree.leaves(tree)]
        count = min(PIECES, max(1, sum(sizes) // SMALLEST))
        size = max(1, math.ceil(sum(sizes) / count))
        self._ranges: list[list[tuple[int, slice]]] = []  # of the leaves, by piece
        for first in range(0, sum(sizes), size):
            self._ranges.append(_ranges(sizes, first, first + size))

    def of(self, tree: Tree) -> list[Piece]:
        """Returns the pieces of a tree."""
        leaves = [np.ravel(x) for x in jax.tree.leaves(tree)]
        return [[leaves[k][part] for k, part in ranges] for ranges in self._ranges]

    def joined(self, pieces: list[Piece]) -> Tree:
        """Returns the tree of some pieces."""
        leaves, treedef = jax.tree.flatten(self._like)
        parts: list[list[np.ndarray]] = [[np.zeros(0, leaf.dtype)] for leaf in leaves]
        for ranges, piece in zip(self._ranges, pieces, strict=True):
            for (k, _), part in zip(ranges, piece, strict=True):
                parts[k].append(part)
        vectors = map(np.concatenate, parts)
        return treedef.unflatten(v.reshape(x.shape) for v, x in zip(vectors, leaves))


def _ranges(sizes: list[int], first: int, last: int) -> list[tuple[int, slice]]:
    """Returns the leaves that elements `first` to `last` are in, and their ranges."""
    found = []
    begin = 0
    for k, size in enumerate(sizes):
        part = slice(max(first - begin, 0), min(last - begin, size))
        if part.start < part.stop:
            found.append((k, part))
        begin += size
    return found
