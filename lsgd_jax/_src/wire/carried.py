"""Trees in as few collectives as possible.

The collectives of a program run one after the other on CPUs, and each waits for the
latencies of the network. Leaves side by side in one array wait for them once. Joining them
costs a copy, which is dear on TPUs, where the last axes of an array lie in tiles.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lsgd_jax._src.layouts import may_be_sharded
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.packing import PACKED_BELOW


def carried(
    collective: Callable[[Array], Array],
    tree: Tree,
    leading: int = 0,
    adds: bool = False,
    joins_on_tpus: bool = True,
) -> Tree:
    """Applies a collective to the leaves of a tree, in as few calls as pays.

    On CPUs all leaves travel in one array, on GPUs all but large ones of 32 bits, which XLA
    joins by itself, on TPUs at most small ones of one dtype. Where arrays may be sharded
    each leaf travels by itself, because joining them would gather the shards.

    Args:
      collective: from an array to an array, whose last axis it leaves alone.
      tree: arrays.
      leading: the number of their leading axes that mean something to the collective.
      adds: whether it adds up, so that each array must be of one dtype.
      joins_on_tpus: whether small leaves of one dtype share an array on TPUs, too.
    """
    leaves = jax.tree.leaves(tree)

    def places(platform: str) -> list[Hashable]:
        return [
            _place(platform, i, x, leading, adds, joins_on_tpus)
            for i, x in enumerate(leaves)
        ]

    def on(platform: str) -> Callable[[Tree], Tree]:

        def call(tree: Tree) -> Tree:
            joint = Joint(tree, places(platform), leading)
            return joint.tree([collective(x) for x in joint.arrays(tree)])

        return call

    if places("cpu") == places("gpu") == places("tpu"):
        return on("cpu")(tree)
    return lax.platform_dependent(tree, cpu=on("cpu"), tpu=on("tpu"), default=on("gpu"))


def _place(
    platform: str, i: int, leaf: Array, leading: int, adds: bool, joins_on_tpus: bool
) -> Hashable:
    """The array in which the i-th leaf travels: leaves of equal places share one."""
    by_itself = i
    by_dtype = leaf.dtype
    is_large = math.prod(leaf.shape[leading:]) > PACKED_BELOW
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return by_itself
    if may_be_sharded():
        return by_itself if leaf.ndim > leading else by_dtype
    if platform == "tpu":
        return by_itself if is_large or not joins_on_tpus else by_dtype
    if platform == "gpu" and is_large and leaf.dtype.itemsize >= 4:
        return by_itself
    return by_dtype if adds else "together"


class Joint:
    """Leaves of a tree side by side in flat arrays.

    Leaves of one dtype stay as they are. Those of several dtypes become unsigned integers
    as wide as the narrowest of them, so that no bits are added.

    Args:
      tree: arrays.
      places: for each leaf the array that it lies in.
      leading: the number of leading axes, which stay.

    >>> tree = {"codes": jnp.arange(3, dtype=jnp.int8), "scale": jnp.ones([1])}
    >>> joint = Joint(tree, [0, 0])
    >>> joint.arrays(tree)
    [Array([  0,   1,   2,   0,   0, 128,  63], dtype=uint8)]
    >>> joint.tree(joint.arrays(tree))["scale"]
    Array([1.], dtype=float32)
    """

    def __init__(self, tree: Tree, places: Sequence[Hashable], leading: int = 0):
        leaves, self._treedef = jax.tree.flatten(tree)
        self._like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        self._leading = leading
        members: dict[Hashable, list[int]] = {}
        for i, place in enumerate(places):
            members.setdefault(place, []).append(i)
        self._members = list(members.values())

    def arrays(self, tree: Tree) -> list[Array]:
        """The arrays of a tree, [*leading, n]; a leaf by itself keeps its shape."""
        leaves = jax.tree.leaves(tree)
        arrays = []
        for members in self._members:
            own = [leaves[i] for i in members]
            if len(own) == 1:
                arrays += own
                continue
            unit = self._unit(members)
            runs = [in_units(x.reshape(*x.shape[: self._leading], -1), unit) for x in own]
            arrays.append(jnp.concatenate(runs, axis=-1))
        return arrays

    def tree(self, arrays: Sequence[Array]) -> Tree:
        """The tree of arrays [..., n], whose leading axes may have changed."""
        leaves: list[Any] = [None] * len(self._like)
        for array, members in zip(arrays, self._members, strict=True):
            if len(members) == 1:
                leaves[members[0]] = array
                continue
            unit = self._unit(members)
            start = 0
            for i in members:
                like = self._like[i]
                shape = like.shape[self._leading :]
                end = start + math.prod(shape) * units(like.dtype, unit)
                run = lax.slice_in_dim(array, start, end, axis=-1)
                leaves[i] = elements(run, unit, like.dtype).reshape(
                    *array.shape[:-1], *shape
                )
                start = end
        return jax.tree.unflatten(self._treedef, leaves)

    def _unit(self, members: Sequence[int]) -> Any:
        """The dtype of an array of these leaves."""
        dtypes = {self._like[i].dtype for i in members}
        if len(dtypes) == 1:
            return dtypes.pop()
        narrowest = min(dtype.itemsize for dtype in dtypes)
        return np.dtype(f"uint{8 * narrowest}")


def units(dtype: Any, unit: Any) -> int:
    """The number of units in an element.

    >>> units(np.dtype("float32"), np.dtype("uint8"))
    4
    """
    return dtype.itemsize // unit.itemsize


def in_units(x: Array, unit: Any) -> Array:
    """The bits of an array [..., n] as an array [..., m] of units."""
    if x.dtype == unit:
        return x
    if x.dtype == jnp.bool:
        return x.astype(unit)
    found = lax.bitcast_convert_type(x, unit)
    return found.reshape(*x.shape[:-1], -1)


def elements(bits: Array, unit: Any, dtype: Any) -> Array:
    """The inverse of `in_units`, an array [..., n] of a dtype."""
    if dtype == unit:
        return bits
    if dtype == jnp.bool:
        return bits.astype(dtype)
    per_element = units(dtype, unit)
    if per_element > 1:
        bits = bits.reshape(*bits.shape[:-1], -1, per_element)
    return lax.bitcast_convert_type(bits, dtype)
