"""The exchange as a detector: workers compare what must be bit-identical in their group.

A fingerprint of the bits goes with each exchange, 8 bytes. A worker whose fingerprint
differs from that of the majority is counted, and takes the majority's value.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from lsgd_jax._src import trees
from lsgd_jax._src.layouts import axes_by_dimension, known_axes, shard_by_shard
from lsgd_jax._src.shared import REPAIR, Shared, is_shared
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.collectives import MeshChannel
from lsgd_jax._src.wire.fingerprints import (
    bits,
    copied_over,
    fingerprint,
    hashes_of,
    numbers,
)
from lsgd_jax._src.wire.group import Group
from lsgd_jax._src.wire.starts import of_any_row


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
        return self._replace(
            target=jnp.zeros_like(self.target), differs=jnp.zeros_like(self.differs)
        )

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
    holders = [MeshChannel((*copied_over(own, axes), *group.axes)) for own in layout]

    def of_shards(held: Promised, before: Fingerprints) -> tuple[Promised, Fingerprints]:
        hashes = hashes_of(jax.tree.leaves(held), layout, axes)
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
        times = of_any_row(~agrees).astype(jnp.int32)
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
    >>> half_equal = jnp.array([[3, 1], [3, 2], [5, 5], [5, 5]], jnp.uint32)[:, None]
    >>> _majority(half_equal, workers=4).tolist()
    [2]
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


def taken_from(group: Group, source: Array, state: Any, where: Array) -> Any:
    """The state with what lock step promises to be equal, and the message, of a worker.

    Args:
      group: all workers.
      source: the index of the worker.
      state: the `PullState` of a delayed pull.
      where: bool scalar, whether this worker takes them. Otherwise they are its own; what
        is shared by all workers is equal anyway.
    """
    pending = state.pending
    message = (pending.z, pending.found, pending.x, pending.stage)
    own = (_promised(state), state.traffic, message)

    def of_shards(own: Any) -> Any:
        count = len(jax.tree.leaves(own))
        holders = [MeshChannel(group.axes)] * count
        return _taken_over(holders, own, jnp.broadcast_to(source, [count]))

    theirs = shard_by_shard(of_shards, own)

    def chosen(mine: Any, other: Any) -> Any:
        if is_shared(mine):
            return other
        return jax.tree.map(lambda x, y: jnp.where(where, y, x), mine, other)

    held, traffic, message = jax.tree.map(chosen, own, theirs, is_leaf=is_shared)
    z, found, x, stage = message
    pending = pending._replace(z=z, found=found, x=x, stage=stage)
    state = _with_promised(state, held)._replace(traffic=traffic, pending=pending)
    if held.target is None:
        return state
    return state._replace(agreement=state.agreement._replace(target=held.target))


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

    def name(path: Sequence[Any]) -> str:
        keys = tuple(key for key in path if str(key) not in (".value", ".reference"))
        _, _, rest = jax.tree_util.keystr(keys, simple=True, separator="/").partition("/")
        return rest

    held = _promised(state)._replace(target=None)
    return (
        *(name(path) for path, _ in jax.tree_util.tree_leaves_with_path(held)),
        "target",
    )


def _promised(state: Any) -> Promised:
    """The part of a pull's state that must be bit-identical in the group."""
    reference = getattr(state.wire, "reference", None)
    target = getattr(state.agreement, "target", None)
    return Promised(trees.in_common(state.rule), reference, target)


def _with_promised(state: Any, held: Promised) -> Any:
    def is_kept(node: Any) -> bool:
        return isinstance(node, Shared | optax.MaskedNode)

    def pick(mine: Any, own: Any) -> Any:
        return own if isinstance(mine, optax.MaskedNode) else mine

    mine = jax.tree.leaves(held.rule, is_leaf=is_kept)
    own, treedef = jax.tree.flatten(state.rule, is_leaf=is_shared)
    state = state._replace(rule=treedef.unflatten(map(pick, mine, own)))
    if not state.wire:
        return state
    return state._replace(wire=state.wire._replace(reference=held.wire))


def _broadcast(holders: MeshChannel, x: Array, source: Array) -> Array:
    """The bits of holder `source`; a sum of floats would lose the sign of -0.0.

    No group counts them: repairs are rare, and no bytes of an exchange.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        data = _broadcast(holders, numbers(x), source)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = (_broadcast(holders, part, source) for part in (x.real, x.imag))
        return lax.complex(*parts)
    sent = holders.broadcast(bits(x), source)
    if x.dtype == jnp.bool_:
        return sent.astype(bool)
    return lax.bitcast_convert_type(sent, x.dtype)
