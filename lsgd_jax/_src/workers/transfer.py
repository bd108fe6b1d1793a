"""Moving trees between the host and the devices of the workers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from lsgd_jax._src.shared import shared_flags
from lsgd_jax._src.trees import Tree


SMALL = 2**16  # numbers that a process says to the others through jax's service


def is_key(x: Any) -> bool:
    """Whether a leaf holds typed random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def split(keys: jax.Array, count: int) -> jax.Array:
    """Splits each of some random keys [...] into several: [count, ...].

    >>> two = jax.random.split(jax.random.key(0))
    >>> split(two[0], 3).shape, split(two, 3).shape
    ((3,), (3, 2))
    """
    each = jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)
    return each(keys.reshape(-1)).reshape(count, *keys.shape)


def place(x: Any, sharding: NamedSharding) -> jax.Array:
    """Places an array, all of which every process has, on the devices."""
    if isinstance(x, jax.Array) and sharding.is_fully_addressable:
        return jax.device_put(x, sharding, may_alias=False)
    host = np.array(x)  # a copy, because a CPU device shares the memory it is given
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def gathered(tree: Tree, replicate: Callable[[Any], Any]) -> Tree:
    """Returns the tree with all workers' rows in every process, by few collectives.

    Leaves travel as one array of bytes. Between processes XLA runs several collectives of a
    program side by side: if a process fails, some would continue after others have failed.

    Args:
      tree: leaves [W, ...], shared ones, and others. Random keys and leaves that are
        sharded inside a worker travel as they are.
      replicate: the jitted identity whose results are on all devices.
    """
    leaves, treedef = jax.tree.flatten(tree)
    flags = list(map(_may_be_packed, leaves))
    chosen = [x for x, packs in zip(leaves, flags) if packs]
    rest = [x for x, packs in zip(leaves, flags) if not packs]
    packed = iter(_unpacked(replicate(_packed(chosen)), chosen) if chosen else [])
    others = iter(replicate(rest) if rest else [])
    return treedef.unflatten(next(packed if packs else others) for packs in flags)


def of_members(gather: Callable[[Any], list[Any]], tree: Tree) -> Tree:
    """Returns the rows of the workers that live, in every process, without collectives.

    Args:
      gather: returns what each process that lives says, as JSON.
      tree: small arrays [W, ...] of numbers, and shared ones.

    Raises:
      ValueError: the arrays are not small.
    """
    leaves, treedef = jax.tree.flatten(tree)
    flags = shared_flags(tree)
    own = [rows_here(x, flag) for x, flag in zip(leaves, flags, strict=True)]
    if sum(x.size for x in own) > SMALL:
        raise ValueError(
            "`fetch` must have small arrays while processes may be lost, "
            f"at most {SMALL} numbers in a process, got {sum(x.size for x in own)}"
        )
    said = gather([x.tolist() for x in own])
    found = []
    for n, (x, flag) in enumerate(zip(own, flags)):
        each = [np.asarray(rows[n], x.dtype).reshape(-1, *x.shape[1:]) for rows in said]
        found.append(x if flag else np.concatenate(each))
    return treedef.unflatten(found)


def rows_here(x: Any, is_shared: bool) -> np.ndarray:
    """The rows of an array [W, ...] that this process holds, in order; or all of it."""
    if not isinstance(x, jax.Array) or is_shared or x.is_fully_addressable:
        return read(x)
    rows = {
        shard.index[0].start or 0: np.asarray(shard.data) for shard in x.addressable_shards
    }
    return np.concatenate([rows[start] for start in sorted(rows)])


def _may_be_packed(x: Any) -> bool:
    """Whether a leaf is sharded along its rows only."""
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return False
    rows, *own = x.sharding.spec or [None]
    return rows is not None and not any(own) and x.size > 0 and not is_key(x)


@jax.jit
def _packed(leaves: list[jax.Array]) -> jax.Array:
    """Leaves [W, ...] as bytes [W, n]."""
    rows = []
    for x in leaves:
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        rows.append(lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1))
    return jnp.concatenate(rows, axis=1)


def _unpacked(rows: jax.Array, like: list[jax.Array]) -> list[np.ndarray]:
    """The inverse of `_packed`, on the host."""
    host = np.asarray(rows.addressable_data(0))
    ends = np.cumsum([x.nbytes // x.shape[0] for x in like])
    parts = np.split(host, ends[:-1], axis=1)
    return [
        np.ascontiguousarray(part).view(x.dtype).reshape(x.shape)
        for part, x in zip(parts, like)
    ]


def read(x: Any) -> Any:
    """Copies a replicated or local leaf to the host; keys stay key arrays."""
    if is_key(x):
        numbers = read(jax.random.key_data(x))
        return jax.random.wrap_key_data(jnp.asarray(numbers), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_data(0)
    return np.asarray(x)
