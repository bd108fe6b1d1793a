"""How the elements of a buffer fall into blocks that share a scale."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from lsgd_jax._src.wire.packing import Packing, joined


class BlockRows(NamedTuple):
    """A flat buffer of leaves, cut into rows of one block; gaps between leaves stay.

    Attributes:
      shape: of the buffer.
      block: elements of a block; leaves begin where a block begins.
      runs: (start, size) of what travels, in the flat buffer.
    """

    shape: tuple[int, ...]
    block: int
    runs: list[tuple[int, int]]

    along = -1

    @classmethod
    def of(cls, packing: Packing, b: int, block: int) -> "BlockRows":
        """The blocks of a buffer; leaves without a gap between them form one run."""
        runs: list[tuple[int, int]] = []
        for _, start, size in packing.runs(b):
            if runs and sum(runs[-1]) == start:
                start = runs[-1][0]
                size = runs.pop()[1] + size
            runs.append((start, size))
        return cls(packing.shape(b), block, runs)

    @property
    def width(self) -> int:
        """The number of codes that travel."""
        return sum(size for _, size in self.runs)

    def blocks(self, x: Array) -> Array:
        """The blocks of a buffer, [n, block]."""
        flat = x.ravel()
        return jnp.pad(flat, (0, -flat.size % self.block)).reshape(-1, self.block)

    def array(self, blocks: Array) -> Array:
        """The buffer of the blocks."""
        return blocks.ravel()[: math.prod(self.shape)].reshape(self.shape)

    def sent(self, codes: Array) -> Array:
        """The codes of the blocks that travel, [width]."""
        flat = codes.ravel()
        return joined([flat[start : start + size] for start, size in self.runs])

    def arrived(self, codes: Array) -> Array:
        """The inverse of `sent`, with zeros in the gaps."""
        ends = np.cumsum([size for _, size in self.runs])
        runs = [codes[end - size : end] for (_, size), end in zip(self.runs, ends)]
        return joined(runs, self.block).reshape(-1, self.block)


class Along(NamedTuple):
    """Blocks along one axis of an array, which is not flattened; further axes may lead.

    Attributes:
      shape: of the array.
      axis: the axis.
      block: elements of a block, which divide it.
    """

    shape: tuple[int, ...]
    axis: int
    block: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block: int, end: int | None = None) -> "Along":
        """The first axis with the largest blocks, of at most `block` elements.

        Blocks divide the axis. Cut along the last one, XLA for TPUs would lay the array out
        anew in float32, because its tiles are 128 elements wide.

        Args:
          shape, block: see above.
          end: the axis at which the search ends. Defaults to the end of the shape.

        >>> Along.of((6, 300), 256)
        Along(shape=(6, 300), axis=1, block=150)
        >>> Along.of((512, 512), 256).axis
        0
        """

        def divisors(n):
            return [b for b in range(1, min(n, block) + 1) if n % b == 0]

        sizes = [max(divisors(n)) for n in shape[:end]]
        return cls(shape, sizes.index(max(sizes)), max(sizes))

    @property
    def along(self) -> int:
        """The axis of the blocks' elements, counted from the last one."""
        return self.axis - len(self.shape)

    @property
    def width(self) -> int:
        """The number of codes along that axis."""
        return self.block

    def blocks(self, x: Array) -> Array:
        """The array with its axis cut in two: [..., n, block, ...]."""
        shape = self.shape
        axis = self.axis
        leading = x.shape[: x.ndim - len(shape)]
        cut = (-1, self.block)
        return x.reshape(*leading, *shape[:axis], *cut, *shape[axis + 1 :])

    def array(self, blocks: Array) -> Array:
        """The array of the blocks."""
        leading = blocks.shape[: blocks.ndim - len(self.shape) - 1]
        return blocks.reshape(*leading, *self.shape)

    def sent(self, codes: Array) -> Array:
        """All codes."""
        return codes

    arrived = sent


class Elements(NamedTuple):
    """An array that stays as it is, in a format without scales.

    Cut along an axis, XLA would gather the shards of an array that may be sharded.

    Attributes:
      shape: of the array.
    """

    shape: tuple[int, ...]

    along = -1
    width = 0  # codes without scales are not packed, at any width

    def blocks(self, x: Array) -> Array:
        """The array."""
        return x

    array = sent = arrived = blocks


Layout = BlockRows | Along | Elements
