"""Moving trees between the host and the devices of the workers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from lsgd_jax._src.shared import is_shared
from lsgd_jax._src.trees import Tree


def is_key(x: Any) -> bool:
    """Whether a leaf holds typed random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def shared_flags(tree: Tree) -> list[bool]:
    """Whether each leaf stands in a `Shared` of all workers."""
    nodes = jax.tree.leaves(tree, is_leaf=is_shared)
    sizes = [(is_shared(node), len(jax.tree.leaves(node))) for node in nodes]
    return [shared for shared, size in sizes for _ in range(size)]


def map_flagged(fn: Callable[[Any, bool], Any], tree: Tree) -> Tree:
    """fn(leaf, whether it is shared) on every leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(map(fn, leaves, shared_flags(tree)))


def of_one(x: Any, leading_axes: int) -> jax.ShapeDtypeStruct:
    """One worker's part of a leaf with so many axes in front of its own."""
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    weak = getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(np.shape(x)[leading_axes:], dtype, weak_type=weak)


def check_rows(tree: Tree, rows: int, whose: str) -> None:
    """Raises ValueError unless every leaf that is not shared has a leading axis of rows."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), shared in zip(leaves, shared_flags(tree)):
        if not shared and np.shape(leaf)[:1] != (rows,):
            raise ValueError(
                f"every leaf must have a leading axis of {rows} ({whose}), got "
                f"shape {np.shape(leaf)} at {jax.tree_util.keystr(path) or 'the top'}"
                "; `replicate` gives every worker a copy of one tree, `share` marks "
                "what has no such axis"
            )


def place(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array, which every process has as a whole, on the devices."""
    if isinstance(x, jax.Array) and sharding.is_fully_addressable:
        return jax.device_put(x, sharding, may_alias=False)
    host = np.array(x)  # a copy: a CPU device works on the very memory it is handed
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def gathered(tree: Tree, replicate: Callable[[Any], Any]) -> Tree:
    """The tree with all workers' rows in every process, by as few collectives as can be.

    Leaves travel as one array of bytes: between processes XLA runs several collectives of a
    program side by side, and if a process is lost some go on after others have failed.

    Args:
      tree: leaves [W, ...], shared ones, and others. Random keys and what is sharded inside
        a worker travel as they are.
      replicate: the jitted identity whose results are on all devices.
    """
    leaves, treedef = jax.tree.flatten(tree)
    flags = list(map(_may_be_packed, leaves))
    chosen = [x for x, packs in zip(leaves, flags) if packs]
    rest = [x for x, packs in zip(leaves, flags) if not packs]
    packed = iter(_unpacked(replicate(_packed(chosen)), chosen) if chosen else [])
    others = iter(replicate(rest) if rest else [])
    return treedef.unflatten(next(packed if packs else others) for packs in flags)


def _may_be_packed(x: Any) -> bool:
    """Whether only its rows lie on different devices."""
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return False
    rows, *own = x.sharding.spec or [None]
    return rows is not None and not any(own) and x.size > 0 and not is_key(x)


@jax.jit
def _packed(leaves: list[jax.Array]) -> jax.Array:
    """Leaves [W, ...] as bytes [W, n]."""

    def as_bytes(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        return lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1)

    return jnp.concatenate(list(map(as_bytes, leaves)), axis=1)


def _unpacked(rows: jax.Array, like: list[jax.Array]) -> list[np.ndarray]:
    """The inverse of `_packed`, on the host."""
    host, start, found = np.asarray(rows.addressable_data(0)), 0, []
    for x in like:
        end = start + x.nbytes // x.shape[0]
        part = np.ascontiguousarray(host[:, start:end]).view(x.dtype)
        found.append(part.reshape(x.shape))
        start = end
    return found


def read(x: Any) -> Any:
    """A replicated or local leaf on the host; keys stay key arrays."""
    if is_key(x):
        numbers = read(jax.random.key_data(x))
        return jax.random.wrap_key_data(jnp.asarray(numbers), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_data(0)
    return np.asarray(x)
