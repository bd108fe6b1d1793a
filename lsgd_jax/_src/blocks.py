"""Trees as the wire formats see them: leaves side by side, each in blocks of its own."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src.packing import Packing
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire import Coded, Runs, Wire, decode, encode


class Blocks:
    """Encodes trees like this one, a few buffers at a time in place of many leaves.

    Small leaves lie side by side in one buffer, each from the start of a block on, so that
    no two share a scale; the zeros between them do not travel. Leaves of integers, of
    bools and of one element travel as they are: one element and its scale are longer.

    Args:
      tree: arrays.
      wire: any format but 'float32'.
    """

    def __init__(self, tree: Tree, wire: Wire):
        self._wire = wire
        coded = [_is_coded(leaf) for leaf in jax.tree.leaves(tree)]
        align = 1 if wire.format == "bfloat16" else wire.block
        self._packing = Packing(tree, coded, align)
        self._coded = [coded[leaves[0]] for leaves in self._packing.members]

    def pack(self, tree: Tree) -> list[Array]:
        """The buffers of a tree of the same shapes."""
        return self._packing.pack(tree)

    def unpack(self, buffers: list[Array], t: Array | None = None) -> Tree:
        """The tree of the buffers; t as in `Packing.unpack`."""
        return self._packing.unpack(buffers, t=t)

    def encode(self, buffers: list[Array], key: Array | None) -> list[Coded | Array]:
        """What travels of the buffers."""

        def one(b: int, x: Array) -> Coded | Array:
            if not self._coded[b]:
                return x
            mine = key if key is None else jax.random.fold_in(key, b)
            return encode(x, self._wire, mine, self._runs(b))

        return [one(b, x) for b, x in enumerate(buffers)]

    def decode(self, message: list[Coded | Array]) -> list[Array]:
        """The buffers that a message was made of, as they arrive."""

        def one(b: int, sent: Coded | Array) -> Array:
            if not isinstance(sent, Coded):
                return sent
            return decode(sent, self._wire, self._packing.shape(b), self._runs(b))

        return [one(b, sent) for b, sent in enumerate(message)]

    def _runs(self, b: int) -> Runs | None:
        """What travels of a buffer: leaves of whole blocks touch, and are one run."""
        runs: list[tuple[int, int]] = []
        for _, start, size in self._packing.runs(b):
            if runs and sum(runs[-1]) == start:
                start, size = runs[-1][0], runs[-1][1] + size
                runs.pop()
            runs.append((start, size))
        whole = runs == [(0, math.prod(self._packing.shape(b)))]
        return None if whole else runs


def _is_coded(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.size > 1
