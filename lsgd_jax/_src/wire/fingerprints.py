"""Fingerprints: hashes of the bits of a tree, the same for every sharding."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.layouts import axes_by_dimension, known_axes, shard_by_shard
from lsgd_jax._src.trees import Tree


def fingerprint(tree: Tree) -> Array:
    """Returns a hash of all bits of a tree, the same for every sharding: uint32 [2].

    A change of a single element always changes it. Other changes go unseen with a
    probability of about 2⁻⁶⁴.
    """
    if not jax.tree.leaves(tree):
        return jnp.zeros([2], jnp.uint32)
    axes = known_axes()
    tree = jax.tree.map(numbers, tree)
    layout = axes_by_dimension(tree)

    def of_shards(tree: Tree) -> Array:
        hashes = hashes_of(jax.tree.leaves(tree), layout, axes)
        return hashes.of_worker.sum(0, dtype=jnp.uint32)

    return shard_by_shard(of_shards, tree, out=lambda _: Spec())


class Hashes(NamedTuple):
    """The hashes of leaves.

    Attributes:
      of_device: uint32 [leaves, 2], of the shards on this device.
      of_worker: uint32 [leaves, 2], of all its devices.
      copies_agree: bool scalar, whether those of its devices that hold the same shard have
        the same bits.
    """

    of_device: Array
    of_worker: Array
    copies_agree: Array


def hashes_of(
    leaves: Sequence[Array],
    layout: Sequence[Sequence[tuple[str, ...]]],
    axes: tuple[str, ...],
) -> Hashes:
    """The hashes of leaves, on one device of a worker.

    Of several devices that hold the same shard the first one counts for the worker. The
    others change the worker's hash only if they differ from it.
    """
    each = zip(map(numbers, leaves), layout)
    found = jnp.stack([_of_leaf(x, n, names) for n, (x, names) in enumerate(each)])
    if not axes:
        return Hashes(found, found, jnp.asarray(True))
    copied = [copied_over(names, axes) for names in layout]
    is_first = [lax.axis_index(c) == 0 if c else jnp.asarray(True) for c in copied]
    of_first = jnp.where(jnp.stack(is_first)[:, None], found, 0)
    first, every = lax.psum((of_first, found), axes)
    count = jnp.array([math.prod(map(lax.axis_size, c)) for c in copied], jnp.uint32)
    apart = every - count[:, None] * first
    return Hashes(found, first ^ apart * jnp.uint32(ODD[0]), (apart == 0).all())


def copied_over(names: Sequence[tuple[str, ...]], axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes inside a worker along which its devices hold copies of a leaf.

    names: the axes over which each dimension is sharded. axes: all axes inside a worker.
    """
    return tuple(axis for axis in axes if axis not in itertools.chain(*names))


def numbers(x: Array) -> Array:
    """The numbers of random keys, and any other array as it is."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jax.random.key_data(x)
    return x


# Odd numbers, so that each product is a bijection of 32 bits: the golden ratio, and those
# of the finalizers of murmur3 and xxHash.
ODD = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
LANES = 0x2C1B3C6D, 0x297A2D39


def _of_leaf(x: Array, number: int, names: Sequence[tuple[str, ...]]) -> Array:
    """The sum over all elements of a hash of place and bits: uint32 [2].

    For a given place the hash is a bijection of the bits. names: the axes over which each
    dimension is sharded.
    """
    place = _place(x, names)
    lanes = []
    for n, word in enumerate(_words(x)):
        seed = jnp.uint32((2 * number + n + 1) * ODD[1] % 2**32)
        mixed = _mixed(word ^ _mixed(place * jnp.uint32(ODD[0]) + seed, ODD[1]), ODD[2])
        lanes.append([_mixed(mixed, odd).sum(dtype=jnp.uint32) for odd in LANES])
    return jnp.array(lanes, jnp.uint32).sum(0, dtype=jnp.uint32)


def _mixed(x: Array, odd: int) -> Array:
    """A bijection of 32 bits."""
    x = (x ^ x >> 16) * jnp.uint32(odd)
    return x ^ x >> 15


def _place(x: Array, names: Sequence[tuple[str, ...]]) -> Array:
    """The index of each element in the whole leaf, modulo 2³²."""
    place = jnp.zeros(x.shape, jnp.uint32)
    stride = 1
    for d in reversed(range(x.ndim)):
        own = names[d] if d < len(names) else ()
        n = x.shape[d]
        along = lax.broadcasted_iota(jnp.uint32, x.shape, d)
        if own:
            along += lax.axis_index(own).astype(jnp.uint32) * jnp.uint32(n)
        place += along * jnp.uint32(stride % 2**32)
        stride *= n * math.prod(map(lax.axis_size, own))
    return place


def _words(x: Array) -> list[Array]:
    """The bits of an array as arrays of uint32 of its shape."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(x.real) + _words(x.imag)
    whole = bits(x)
    low = whole.astype(jnp.uint32)
    if whole.dtype.itemsize < 8:
        return [low]
    return [low, (whole >> 32).astype(jnp.uint32)]


def bits(x: Array) -> Array:
    """The bits of an array as unsigned integers of its width."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    width = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else None
    width = width or jnp.finfo(x.dtype).bits
    return lax.bitcast_convert_type(x, f"uint{width}")
