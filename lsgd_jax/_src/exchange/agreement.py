"""The exchange as a detector: workers compare what must be bit-identical in their group.

A fingerprint of the bits goes with each exchange, 8 bytes. A worker whose fingerprint
differs from that of the majority is counted, and takes the majority's value.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src import trees
from lsgd_jax._src.exchange.branch import typed_alike
from lsgd_jax._src.layouts import axes_by_dimension, known_axes, shard_by_shard
from lsgd_jax._src.shared import REPAIR, Shared
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.collectives import MeshChannel
from lsgd_jax._src.wire.group import Group


class Fingerprints(NamedTuple):
    """What a worker knows about its agreement with the others; per worker.

    Attributes:
      target: uint32 [2], the fingerprint of the last target of a rule whose target
        `is_common`; otherwise 0.
      differs: bool scalar, whether it differed from the majority at the last exchange.
      differed: int32 scalar, how often it differed.
      leaf: int32 scalar, the first leaf that differed the last time, an index into
        `names`; -1 before.
    """

    target: Array
    differs: Array
    differed: Array
    leaf: Array

    @classmethod
    def start(cls) -> "Fingerprints":
        """Returns the state before the first exchange."""
        nothing = jnp.zeros([2], jnp.uint32)
        return cls(nothing, jnp.asarray(False), jnp.int32(0), jnp.int32(-1))

    def __lsgd_resized__(self) -> "Fingerprints":
        """For `resize`: the last target was that of other workers."""
        nothing = lambda x: jax.tree.map(jnp.zeros_like, x)
        return self._replace(target=nothing(self.target), differs=nothing(self.differs))

    def after(self, z: Tree, found: Array) -> "Fingerprints":
        """Returns the state after an exchange with the target z, equal in the group."""
        return self._replace(target=jnp.where(found, fingerprint(z), self.target))


def verified(group: Group, state: Any) -> Any:
    """Compares the fingerprints of the group, and repairs a worker that differs.

    A worker may be spread over several devices, which hold copies of what is not sharded.
    Workers therefore compare one fingerprint, and in a repair the holders of each leaf
    vote: all devices of all workers that must hold the same bits.

    Args:
      group: the workers; counts the bytes.
      state: the `PullState` of a pull with `verify`.

    Returns:
      The state with the majority's values, see `_majority`.
    """
    axes = known_axes()
    if group.size == 1 and not axes:
        return state
    layout = axes_by_dimension(_promised(state))
    holders = [MeshChannel((*_copied_over(own, axes), *group.axes)) for own in layout]

    def of_shards(held: Promised, before: Fingerprints) -> tuple[Promised, Fingerprints]:
        hashes = _hashes(jax.tree.leaves(held), layout, axes)
        # One hash of all leaves travels. Its lowest bit says whether a worker's own copies
        # agree, because the copies of all workers may differ in the same way.
        high, low = hashes.of_worker.sum(0, dtype=jnp.uint32)
        flag = hashes.copies_agree.astype(jnp.uint32)
        rows = group.gather(jnp.stack([high, low >> 1 << 1 | flag]))
        agrees = (rows == rows[:1]).all() & (rows[0, 1] & 1 == 1)

        def repair(
            _: Any, carried: tuple[Promised, Fingerprints]
        ) -> tuple[Promised, Fingerprints]:
            held, before = carried
            # XLA would move what does not depend on the loop's state out of the loop.
            mine, _ = lax.optimization_barrier((hashes.of_device, before.differed))
            sources, wrong = _voted(group, holders, mine, axes)
            differs = wrong.any()
            after = before._replace(
                differs=differs,
                differed=before.differed + differs.astype(jnp.int32),
                leaf=jnp.where(differs, jnp.argmax(wrong).astype(jnp.int32), before.leaf),
            )
            return _taken_over(holders, held, sources), after

        # A loop changes its state in place, where a branch would hold a copy.
        times = _of_any_row(~agrees).astype(jnp.int32)
        carried = held, before._replace(differs=jnp.zeros_like(agrees))
        with jax.named_scope(REPAIR):
            return lax.fori_loop(0, times, repair, carried)

    counters = state.agreement._replace(target=())
    held, after = shard_by_shard(
        of_shards, _promised(state), counters, out=lambda *specs: specs
    )
    return _with_promised(state, held)._replace(
        agreement=after._replace(target=held.target)
    )


def common_start(group: Group, params: Tree) -> Tree:
    """A tree that is equal in the group before the first exchange, in float32 or wider.

    It is the parameters themselves if all workers start from the same ones, which their
    fingerprints tell. Otherwise it is the mean of the finite starts, and only then do the
    parameters travel. Elements that are not finite are 0.
    """
    start = lax.stop_gradient(trees.widened(params))
    if group.is_bound and group.size > 1:
        prints = group.gather(fingerprint(start))
        differ = (prints != prints[:1]).any()

        def mean(_: Any, start: Tree) -> Tree:
            found, _ = group.masked_mean(start, trees.all_finite(start))
            return trees.where(differ, found, start)

        # Under a `jax.vmap` a branch would become a `select` and always communicate.
        times = _of_any_row(differ).astype(jnp.int32)
        start = jax.tree.map(lambda x: typed_alike(x, differ), start)
        with jax.named_scope(REPAIR):
            start = lax.fori_loop(0, times, mean, start)
        start = group.channel.known_equal(start)
    return jax.tree.map(trees.finite_part, start)


def _voted(
    group: Group, holders: Sequence[MeshChannel], mine: Array, axes: tuple[str, ...]
) -> tuple[Array, Array]:
    """The source of each leaf, and whether this worker differs from it.

    Args:
      group: the workers.
      holders: for each leaf the devices that hold the same bits.
      mine: uint32 [leaves, 2], the hash of each leaf on this device.
      axes: those inside a worker.

    Returns:
      (sources, wrong): the index of a holder of each leaf, int32 [leaves], and bool
      [leaves].
    """
    sources = jnp.zeros(len(holders), jnp.int32)
    wrong = jnp.zeros(len(holders), jnp.int32)
    for channel in dict.fromkeys(holders):
        leaves = np.array([n for n, own in enumerate(holders) if own == channel])
        votes = channel.gather(mine[leaves])
        source = _majority(votes, group.size)
        right = jnp.take_along_axis(votes, source[None, :, None], axis=0)[0]
        differs = (right != mine[leaves]).any(-1)
        sources = sources.at[leaves].set(source)
        wrong = wrong.at[leaves].set(differs.astype(jnp.int32))
    # Any device of a worker counts for the worker.
    return sources, (lax.psum(wrong, axes) if axes else wrong) > 0


def _majority(votes: Array, workers: int) -> Array:
    """The index of a holder in the largest class of equal ones, for each leaf: int32.

    Of several largest classes one with a worker whose own copies agree counts, and then the
    one with the lowest index. The index is of such a worker if the class has one.

    Args:
      votes: uint32 [copies * workers, leaves, 2], the hashes of all holders.
      workers: their number.

    >>> votes = jnp.array([[7, 7], [3, 3], [3, 3], [3, 3]], jnp.uint32)[:, None]
    >>> _majority(votes, workers=2).tolist()
    [1]
    """
    high = votes[..., 0]
    low = votes[..., 1]
    same = (high[:, None] == high[None]) & (low[:, None] == low[None])
    members = same.sum(1, dtype=jnp.int32)
    by_copy = votes.reshape(-1, workers, *votes.shape[1:])
    is_whole = (by_copy == by_copy[:1]).all((0, -1)).astype(jnp.int32)
    rank = 2 * members + jnp.tile(is_whole, (len(by_copy), 1))
    return jnp.argmax(rank, axis=0).astype(jnp.int32)


def _taken_over(holders: Sequence[MeshChannel], tree: Tree, sources: Array) -> Tree:
    """The tree of the sources, sent leaf by leaf, so that few buffers are needed."""
    leaves, treedef = jax.tree.flatten(tree)
    for n, leaf in enumerate(leaves):
        # Chained, so that XLA does not send all leaves at once, which takes buffers for
        # all.
        if n:
            leaf, leaves[n - 1] = lax.optimization_barrier((leaf, leaves[n - 1]))
        leaves[n] = _broadcast(holders[n], leaf, sources[n])
    return treedef.unflatten(leaves)


@custom_vmap
def _of_any_row(condition: Array) -> Array:
    """Returns the condition; under `jax.vmap`, whether it holds in any row.

    All rows then repair together: they meet in the same messages.
    """
    return condition


@_of_any_row.def_vmap
def _(size: int, batched: list[bool], condition: Array) -> tuple[Array, bool]:
    del size
    return (_of_any_row(condition.any(0)) if batched[0] else condition), False


# What lock step promises to be bit-identical in the group


class Promised(NamedTuple):
    """What must be bit-identical in the group.

    Attributes:
      rule: the rule's state, of which only the shared nodes are left.
      wire: the reference of the wire format, or None.
      target: the fingerprint of the last target, see `Fingerprints`.
    """

    rule: Any
    wire: Tree | None
    target: Array | None


def names(state: Any) -> tuple[str, ...]:
    """Returns the names of the leaves that are compared: paths, and 'target' at the end."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    held = _promised(state)._replace(target=None)
    paths = [
        name(tuple(key for key in path if str(key) not in (".value", ".reference")))
        for path, _ in jax.tree_util.tree_leaves_with_path(held)
    ]
    return (*(path.partition("/")[2] for path in paths), "target")


def _promised(state: Any) -> Promised:
    """The part of a pull's state that must be bit-identical in the group."""
    reference = getattr(state.wire, "reference", None)
    return Promised(trees.in_common(state.rule), reference, state.agreement.target)


def _with_promised(state: Any, held: Promised) -> Any:
    is_kept = lambda node: isinstance(node, Shared | optax.MaskedNode)
    pick = lambda mine, own: own if isinstance(mine, optax.MaskedNode) else mine
    is_own = lambda node: isinstance(node, Shared)
    mine = jax.tree.leaves(held.rule, is_leaf=is_kept)
    own, treedef = jax.tree.flatten(state.rule, is_leaf=is_own)
    state = state._replace(rule=treedef.unflatten(map(pick, mine, own)))
    if not state.wire:
        return state
    return state._replace(wire=state.wire._replace(reference=held.wire))


def _broadcast(holders: MeshChannel, x: Array, source: Array) -> Array:
    """The bits of holder `source`; a sum of floats would lose the sign of -0.0.

    No group counts them: repairs are rare, and no bytes of an exchange.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        data = _broadcast(holders, _numbers(x), source)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = (_broadcast(holders, part, source) for part in (x.real, x.imag))
        return lax.complex(*parts)
    sent = holders.broadcast(_bits(x), source)
    if x.dtype == jnp.bool_:
        return sent.astype(bool)
    return lax.bitcast_convert_type(sent, x.dtype)


# Fingerprints


def fingerprint(tree: Tree) -> Array:
    """Returns a hash of all bits of a tree, the same for every sharding: uint32 [2].

    A change of a single element always changes it. Other changes go unseen with a
    probability of about 2⁻⁶⁴.
    """
    if not jax.tree.leaves(tree):
        return jnp.zeros([2], jnp.uint32)
    axes = known_axes()
    tree = jax.tree.map(_numbers, tree)
    layout = axes_by_dimension(tree)

    def of_shards(tree: Tree) -> Array:
        hashes = _hashes(jax.tree.leaves(tree), layout, axes)
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


def _hashes(
    leaves: Sequence[Array],
    layout: Sequence[Sequence[tuple[str, ...]]],
    axes: tuple[str, ...],
) -> Hashes:
    """The hashes of leaves, on one device of a worker.

    Of several devices that hold the same shard the first one counts for the worker. The
    others change the worker's hash only if they differ from it.
    """
    each = zip(map(_numbers, leaves), layout)
    found = jnp.stack([_of_leaf(x, n, names) for n, (x, names) in enumerate(each)])
    if not axes:
        return Hashes(found, found, jnp.asarray(True))
    copied = [_copied_over(names, axes) for names in layout]
    is_first = [lax.axis_index(c) == 0 if c else jnp.asarray(True) for c in copied]
    of_first = jnp.where(jnp.stack(is_first)[:, None], found, 0)
    first, every = lax.psum((of_first, found), axes)
    count = jnp.array([math.prod(map(lax.axis_size, c)) for c in copied], jnp.uint32)
    apart = every - count[:, None] * first
    return Hashes(found, first ^ apart * jnp.uint32(ODD[0]), (apart == 0).all())


def _copied_over(
    names: Sequence[tuple[str, ...]], axes: tuple[str, ...]
) -> tuple[str, ...]:
    """The axes inside a worker along which its devices hold copies of a leaf.

    names: the axes over which each dimension is sharded. axes: all axes inside a worker.
    """
    return tuple(axis for axis in axes if axis not in itertools.chain(*names))


def _numbers(x: Array) -> Array:
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
    place, lanes = _place(x, names), []
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
    place, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for d in reversed(range(x.ndim)):
        own, n = names[d] if d < len(names) else (), x.shape[d]
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
    bits = _bits(x)
    low = bits.astype(jnp.uint32)
    return [low, (bits >> 32).astype(jnp.uint32)] if bits.dtype.itemsize == 8 else [low]


def _bits(x: Array) -> Array:
    """The bits of an array as unsigned integers of its width."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    width = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else None
    width = width or jnp.finfo(x.dtype).bits
    return lax.bitcast_convert_type(x, f"uint{width}")
