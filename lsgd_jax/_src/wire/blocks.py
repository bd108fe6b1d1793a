"""How the elements of a buffer fall into blocks that share a scale."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from lsgd_jax._src.wire.packing import Packing, joined


class Rows(NamedTuple):
    """A flat buffer of leaves, cut into rows of one block; gaps between leaves stay.

    Attributes:
      shape: of the buffer.
      block: elements of a block; leaves begin where a block begins.
      runs: (start, size) of what travels, in the flat buffer.
    """

    shape: tuple[int, ...]
    block: int
    runs: list[tuple[int, int]]

    @classmethod
    def of(cls, packing: Packing, b: int, block: int) -> "Rows":
        """The blocks of a buffer; leaves without a gap between them form one run."""
        runs: list[tuple[int, int]] = []
        for _, start, size in packing.runs(b):
            if runs and sum(runs[-1]) == start:
                start, size = runs[-1][0], runs.pop()[1] + size
            runs.append((start, size))
        return cls(packing.shape(b), block, runs)

    @property
    def width(self) -> int:
        """The number of codes that travel."""
        return sum(size for _, size in self.runs)

    def blocks(self, x: Array) -> Array:
        """The blocks of a buffer, [n, block]."""
        return rows_of(x, self.block)

    def array(self, blocks: Array) -> Array:
        """The buffer of the blocks."""
        return array_of(blocks, self.shape)

    def sent(self, codes: Array) -> Array:
        """The codes of the blocks that travel, [width]."""
        flat = codes.ravel()
        return joined([flat[start : start + size] for start, size in self.runs])

    def arrived(self, codes: Array) -> Array:
        """The inverse of `sent`, with zeros in the gaps."""
        ends = np.cumsum([size for _, size in self.runs])
        runs = [codes[end - size : end] for (_, size), end in zip(self.runs, ends)]
        return rows_of(joined(runs, self.block), self.block)


class Along(NamedTuple):
    """Blocks along one axis of an array that may be sharded, which is not flattened.

    Attributes:
      shape: of the array.
      axis: the axis.
      block: elements of a block, which divide it.
    """

    shape: tuple[int, ...]
    axis: int
    block: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block: int) -> "Along":
        """The first axis with the largest blocks, of at most `block` elements.

        Blocks divide the axis. Cut along the last one, XLA for TPUs would lay the array out
        anew in float32, because its tiles are 128 elements wide.

        >>> Along.of((6, 300), 256)
        Along(shape=(6, 300), axis=1, block=150)
        >>> Along.of((512, 512), 256).axis
        0
        """

        def largest(n: int) -> int:
            return max(b for b in range(1, min(n, block) + 1) if n % b == 0)

        sizes = list(map(largest, shape))
        return cls(shape, sizes.index(max(sizes)), max(sizes))

    @property
    def width(self) -> int:
        """The number of codes along the last axis."""
        return self.block

    def blocks(self, x: Array) -> Array:
        """The blocks of the array, [..., block]."""
        return jnp.moveaxis(x.reshape(self._cut), self.axis + 1, -1)

    def array(self, blocks: Array) -> Array:
        """The array of the blocks."""
        return jnp.moveaxis(blocks, -1, self.axis + 1).reshape(self.shape)

    def sent(self, codes: Array) -> Array:
        """All codes."""
        return codes

    arrived = sent

    @property
    def _cut(self) -> tuple[int, ...]:
        shape, axis = self.shape, self.axis
        cut = shape[axis] // self.block, self.block
        return *shape[:axis], *cut, *shape[axis + 1 :]


class Elements(NamedTuple):
    """An array that may be sharded, in a format without scales: it stays as it is.

    Cut along an axis, XLA would gather its shards.

    Attributes:
      shape: of the array.
    """

    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """The number of codes along the last axis."""
        return self.shape[-1]

    def blocks(self, x: Array) -> Array:
        """The array."""
        return x

    array = sent = arrived = blocks


Layout = Rows | Along | Elements


def array_of(rows: Array, shape: tuple[int, ...]) -> Array:
    """The array of that shape of which `rows_of` made the rows."""
    return rows.ravel()[: math.prod(shape)].reshape(shape)


def rows_of(x: Array, block: int, parts: int = 1) -> Array:
    """x in rows of one block, with zeros behind its end: a multiple of `parts` rows."""
    flat = x.ravel()
    return jnp.pad(flat, (0, -flat.size % (block * parts))).reshape(-1, block)
