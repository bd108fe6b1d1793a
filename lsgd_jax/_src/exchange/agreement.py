"""The exchange as a detector: workers compare what must be bit-identical in their group.

A fingerprint of the bits goes with each exchange, 8 bytes. A worker whose fingerprint
differs from that of the majority is counted, and takes the majority's value.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src import trees
from lsgd_jax._src.exchange.branch import typed_alike
from lsgd_jax._src.layouts import axes_by_dimension, known_axes, shard_by_shard
from lsgd_jax._src.shared import REPAIR, Shared
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group


class Agreement(NamedTuple):
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
    def start(cls) -> "Agreement":
        """Returns the state before the first exchange."""
        nothing = jnp.zeros([2], jnp.uint32)
        return cls(nothing, jnp.asarray(False), jnp.int32(0), jnp.int32(-1))

    def __lsgd_resized__(self) -> "Agreement":
        """For `resize`: the last target was that of other workers."""
        nothing = lambda x: jax.tree.map(jnp.zeros_like, x)
        return self._replace(target=nothing(self.target), differs=nothing(self.differs))

    def after(self, z: Tree, found: Array) -> "Agreement":
        """Returns the state after an exchange with the target z, equal in the group."""
        return self._replace(target=jnp.where(found, fingerprint(z), self.target))


def verified(group: Group, state: Any) -> Any:
    """Compares the fingerprints of the group, and repairs a worker that differs.

    Args:
      group: the workers; counts the bytes.
      state: the `PullState` of a pull with `verify`.

    Returns:
      The state with the majority's values. Of several largest classes of equal workers,
      the one with the lowest index counts as the majority.
    """
    if group.size == 1:
        return state
    held = _promised(state)
    each = jnp.concatenate([fingerprints(held), state.agreement.target[None]])
    # One hash of all leaves travels. Which leaf differs is asked only in a repair.
    rows = group.gather(each.sum(0, dtype=jnp.uint32))
    same = (rows[:, None] == rows[None]).all(-1)
    source = jnp.argmax(same.sum(1)).astype(jnp.int32)
    differs = ~same[source, group.index]

    def repair(_: Any, carried: tuple[Tree, Agreement]) -> tuple[Tree, Agreement]:
        held, before = carried
        # XLA would move what does not depend on the loop's state out of the loop.
        mine, _ = lax.optimization_barrier((each, before.target))
        others = group.channel.gather(mine)[source]
        leaf = jnp.argmax((others != mine).any(-1)).astype(jnp.int32)
        after = Agreement(
            _broadcast(group, before.target, source),
            differs,
            before.differed + differs.astype(jnp.int32),
            jnp.where(differs, leaf, before.leaf),
        )
        return _taken_over(group, held, source), after

    # A loop changes its state in place, where a branch would hold a copy.
    times = _of_any_row(~same[source].all()).astype(jnp.int32)
    carried = held, state.agreement._replace(differs=differs)
    with jax.named_scope(REPAIR):
        held, after = lax.fori_loop(0, times, repair, carried)
    return _with_promised(state, held)._replace(agreement=after)


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


def _taken_over(group: Group, tree: Tree, source: Array) -> Tree:
    """The tree of worker `source`, sent leaf by leaf, so that few buffers are needed."""
    leaves, treedef = jax.tree.flatten(tree)
    for n, leaf in enumerate(leaves):
        # Chained, so that XLA does not send all leaves at once, which takes buffers for
        # all.
        if n:
            leaf, leaves[n - 1] = lax.optimization_barrier((leaf, leaves[n - 1]))
        leaves[n] = _broadcast(group, leaf, source)
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


def names(state: Any) -> tuple[str, ...]:
    """Returns the names of the leaves that are compared: paths, and 'target' at the end."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    paths = [
        name(tuple(key for key in path if str(key) not in (".value", ".reference")))
        for path, _ in jax.tree_util.tree_leaves_with_path(_promised(state))
    ]
    return (*(path.partition("/")[2] for path in paths), "target")


def _promised(state: Any) -> Tree:
    """The shared nodes of the rule's state, and the reference of the wire format."""
    keep = lambda node: node if isinstance(node, Shared) else optax.MaskedNode()
    rule = jax.tree.map(keep, state.rule, is_leaf=lambda node: isinstance(node, Shared))
    return {"rule": rule, "wire": getattr(state.wire, "reference", None)}


def _with_promised(state: Any, held: Tree) -> Any:
    is_kept = lambda node: isinstance(node, Shared | optax.MaskedNode)
    pick = lambda mine, own: own if isinstance(mine, optax.MaskedNode) else mine
    is_own = lambda node: isinstance(node, Shared)
    mine = jax.tree.leaves(held["rule"], is_leaf=is_kept)
    own, treedef = jax.tree.flatten(state.rule, is_leaf=is_own)
    state = state._replace(rule=treedef.unflatten(map(pick, mine, own)))
    if not state.wire:
        return state
    return state._replace(wire=state.wire._replace(reference=held["wire"]))


def _broadcast(group: Group, x: Array, source: Array) -> Array:
    """The bits of worker `source`; a sum of floats would lose the sign of -0.0."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        data = _broadcast(group, jax.random.key_data(x), source)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = (_broadcast(group, part, source) for part in (x.real, x.imag))
        return lax.complex(*parts)
    # Past the group's counter: repairs are rare, and no bytes of an exchange.
    sent = group.channel.broadcast(_bits(x), source)
    if x.dtype == jnp.bool_:
        return sent.astype(bool)
    return lax.bitcast_convert_type(sent, x.dtype)


# Fingerprints


def fingerprint(tree: Tree) -> Array:
    """Returns a hash of all bits of a tree, the same for every sharding: uint32 [2].

    A change of a single element always changes it. Other changes go unseen with a
    probability of about 2⁻⁶⁴.
    """
    return fingerprints(tree).sum(0, dtype=jnp.uint32)


def fingerprints(tree: Tree) -> Array:
    """Returns the summands of `fingerprint`: uint32 [leaves, 2]."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.extended)
    tree = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    if not jax.tree.leaves(tree):
        return jnp.zeros([0, 2], jnp.uint32)
    axes = known_axes()
    layout: list[list[tuple[str, ...]]] = []

    def of_shards(tree: Tree) -> Array:
        leaves = jax.tree.leaves(tree)
        own = layout or [[]] * len(leaves)
        found = [_of_leaf(x, n, names) for n, (x, names) in enumerate(zip(leaves, own))]
        return _added(jnp.stack(found), own, axes) if axes else jnp.stack(found)

    layout += axes_by_dimension(tree)
    return shard_by_shard(of_shards, tree, out=lambda _: Spec())


def _added(
    found: Array, layout: Sequence[Sequence[tuple[str, ...]]], axes: tuple[str, ...]
) -> Array:
    """The sum over a worker's devices.

    Of several devices that hold the same shard the first one counts. The others change the
    sum only if they differ from it.
    """
    copies = [
        [axis for axis in axes if axis not in sum(map(tuple, names), ())]
        for names in layout
    ]
    is_first = jnp.stack(
        [lax.axis_index(tuple(c)) == 0 if c else jnp.asarray(True) for c in copies]
    )
    count = jnp.array([math.prod(map(lax.axis_size, c)) for c in copies], jnp.uint32)
    first, every = lax.psum((jnp.where(is_first[:, None], found, 0), found), axes)
    # The second term is 0 unless a copy differs from the first one.
    return first ^ (every - count[:, None] * first) * jnp.uint32(ODD[0])


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
