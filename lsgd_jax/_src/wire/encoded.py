"""EncodedGroup: a group whose parameters travel in a narrow wire format.

One source: the codes of Q(v - r) travel, and all workers, the source too, take
z = r + Q(v - r). A mean: all workers' codes are gathered, or a share of them by each worker
(see `narrow_sums`), and added up in one order, so that z is bit-identical on all workers; a
worker adds its quantization error to its next message (error feedback). To peers: Q(y), and
the rule gives the error back to the sender.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src import trees
from lsgd_jax._src.explicit import with_automatic_axes
from lsgd_jax._src.layouts import (
    known_axes,
    may_be_sharded,
    shard_by_shard,
    sharded_over,
    whole_rows,
)
from lsgd_jax._src.moved import renamed_argument
from lsgd_jax._src.shared import Axes, Shared
from lsgd_jax._src.trees import Tree, finite_part, is_float, widened
from lsgd_jax._src.wire import narrow_sums
from lsgd_jax._src.wire.codec import Codec, Message, draws, is_coded
from lsgd_jax._src.wire.collectives import Permutation
from lsgd_jax._src.wire.group import Group
from lsgd_jax._src.wire.packing import Packing
from lsgd_jax._src.wire.top_k import TopK
from lsgd_jax._src.wire.wire import Wire


class WireState(NamedTuple):
    """The memory of a pull with a narrow wire format; None where it needs none.

    Attributes:
      reference: r, the target agreed on last, at first the group's common start; a tree
        like the part, in float32 at least; shared if the group is all workers, else per
        worker, equal in the group.
      error: e, the quantization error of what this worker sent, 0 at first; likewise; per
        worker.
    """

    reference: Shared[Tree] | Tree | None
    error: Tree | None

    @classmethod
    def start(cls, keeps: Sequence[str], group: Group, part: Tree) -> "WireState":
        """Returns the memory before the first exchange."""
        reference = None
        error = None
        if "reference" in keeps:
            shared = group.start(part)
            reference = shared if shared.axes is None else shared.value
        if "error" in keeps:
            error = trees.zeros(part)
        return cls(reference, error)

    def without_error(self, restored: Array) -> "WireState":
        """Clears the error of a worker that was restored."""

        def cleared(e: Array) -> Array:
            return jnp.where(restored, jnp.zeros_like(e), e)

        return self._replace(error=jax.tree.map(cleared, self.error))

    def __lsgd_resized__(self) -> "WireState":
        """For `resize`: keeps the reference, and no error, which was another worker's.

        References that were equal in a group of the old workers become their mean, which
        is equal in all groups of the new ones.
        """
        reference = self.reference
        if not isinstance(reference, Shared):
            reference = jax.tree.map(_mean_of_rows, reference)
        return WireState(reference, jax.tree.map(jnp.zeros_like, self.error))


def _mean_of_rows(x: Array) -> Array:
    """The mean over the leading axis, in every row."""
    mean = finite_part(jnp.mean(x, axis=0, keepdims=True))
    return jnp.broadcast_to(mean, x.shape)


# The sums of all messages and this worker's errors, by buffer; the number of workers.
Sums = tuple[list[Array], list[Array], Array]


class EncodedGroup(Group):
    """A group on which trees of parameters travel in a narrow wire format.

    Args:
      axes, channel: as for `Group`.
      wire: the format, not 'float32'.
      kept: the pull's `WireState`.
      t: int32 scalar, the step, from which random keys are derived.
      sent: bytes that this worker has sent before.
    """

    def __init__(
        self,
        axes: Axes,
        channel: Any,
        wire: Wire | TopK,
        kept: WireState,
        t: Array,
        sent: float = 0.0,
    ):
        super().__init__(axes, channel)
        self.bytes_sent = sent
        self.kept = kept
        self._t = t
        self._wire: Any = wire
        self._keeps_one = False
        # Asynchronous workers only gather, and a share must not cut the shards of a worker.
        shards_are_known = bool(known_axes()) or not may_be_sharded()
        self._cuts = self.channel.transposes and shards_are_known
        # The workers that add up in float32, and those that exchange encoded messages.
        self._inside = Group(())
        self._across: Group = self
        if self._cuts and wire.across:
            self._across = Group(wire.across)
            slow = self._across.axes
            self._inside = Group(tuple(axis for axis in self.axes if axis not in slow))

    @property
    def reference(self) -> Tree | None:
        """r, the target agreed on last."""
        return _reference(self.kept)

    @with_automatic_axes
    def broadcast(self, tree: Tree, source: Array) -> Tree:
        """z = r + Q(v - r), with v the tree of worker `source`; r ← z."""
        self._keep_one()
        if self.size == 1:
            return super().broadcast(tree, source)

        def send(codec: Codec, t: Array, tree: Tree, kept: WireState, source: Array) -> Any:
            v = codec.pack(tree)
            r = codec.pack(_reference(kept))
            message, _ = codec.round_buffers(list(map(_minus, v, r)), self._key(t))
            self._count(message)
            q = codec.decode_buffers(self.channel.broadcast(message, source))
            z = list(map(_plus, v, r, q))
            return codec.unpack(z), self._remembered(codec, t, z, r, kept)

        def layout(specs: Any, kept: Any, source: Any) -> Any:
            return specs, kept

        z, self.kept = self._on_shards(send, tree, self.kept, source, layout=layout)
        return z

    def masked_sum(self, tree: Tree, where: Array | bool = True) -> tuple[Tree, Array]:
        """Σ Q(v + βe)."""
        self._keep_one()
        if self._is_exact:
            return super().masked_sum(tree, where)
        in_shares = self._in_shares(tree)

        def add_up(codec, t, tree, kept, where):
            v = codec.pack(tree)
            sums, count, kept = self._sums(codec, t, v, kept, where, in_shares)
            return (codec.unpack(sums), count), kept

        return self._added_up(add_up, tree, where)

    def masked_mean(
        self, tree: Tree, where: Array | bool = True, reference: Tree | None = None
    ) -> tuple[Tree, Array]:
        """z = r + Σ Q(v - r + βe) / n with the rule's r, or with the last target, r ← z."""
        self._keep_one()
        if self._is_exact:
            return super().masked_mean(tree, where)
        in_shares = self._in_shares(tree)

        def add_up(codec, t, tree, kept, where, reference):
            v = codec.pack(tree)
            r = codec.pack(_reference(kept) if reference is None else reference)
            gaps = list(map(_minus, v, r))
            sums, count, kept = self._sums(codec, t, gaps, kept, where, in_shares)
            z = list(map(_plus, v, r, trees.mean_of(sums, count)))
            if reference is None:
                kept = self._remembered(codec, t, z, r, kept)
            return (codec.unpack(z), count), kept

        return self._added_up(add_up, tree, where, reference)

    @property
    def _is_exact(self) -> bool:
        """Whether sums need no messages; a worker alone holds back what 'top-k' skips."""
        return self._across.size == 1 and not self._wire.is_sparse

    def _added_up(
        self, add_up: Callable, tree: Tree, where: Array | bool, *others: Any
    ) -> tuple[Tree, Array]:
        """Runs `add_up` on the shards, keeps what it remembers, and counts its bytes."""

        def layout(specs: Any, kept: Any, *others: Any) -> Any:
            return (specs, Spec()), kept

        where = jnp.asarray(where)
        total, self.kept = self._on_shards(
            add_up, tree, self.kept, where, *others, layout=layout
        )
        if self._across is not self:
            self.bytes_sent += self._inside.bytes_sent + self._across.bytes_sent
        return total

    @renamed_argument(turn="number")
    @with_automatic_axes
    def permute(self, tree: Tree, permutation: Permutation, number: int = 0) -> Tree:
        """Q(y) of this worker's source."""
        if self.size == 1:
            return super().permute(tree, permutation, number)

        def send(codec: Codec, t: Array, tree: Tree) -> Tree:
            message = codec.encode(tree, self._key(t, number))
            return codec.decode(self._permuted(message, permutation))

        return self._on_shards(send, tree)

    @renamed_argument(turn="number")
    def quantization_error(self, tree: Tree, number: int = 0) -> Tree | None:
        """y - Q(y)."""
        if self.size == 1:
            return None

        def error(codec: Codec, t: Array, tree: Tree) -> Tree | None:
            return codec.error(tree, codec.encode(tree, self._key(t, number)))

        return self._on_shards(error, tree)

    # How

    def _keep_one(self) -> None:
        """Raises ValueError for a second tree whose reference and error would be kept."""
        if self._keeps_one:
            raise ValueError(
                "with a narrow `wire` a rule may call one of `broadcast`, `masked_mean` "
                "and `masked_sum`, once: the state has one reference and one error; put "
                "all trees in one"
            )
        self._keeps_one = True

    def _in_shares(self, tree: Tree) -> bool:
        """Whether a sum is taken by shares in place of a gather, which any channel has."""
        if not self._cuts or isinstance(self._wire, TopK):
            return False
        sizes = [x.size for x in jax.tree.leaves(tree) if is_coded(x)]
        parts = [-(-size // self._inside.size) for size in sizes]
        return narrow_sums.pays(parts, self._wire, self._across.size)

    def _on_shards(
        self,
        fn: Callable,
        tree: Tree,
        *others: Any,
        layout: Callable = lambda specs, *others: specs,
    ) -> Any:
        """Runs fn(codec, t, tree, *others) on each device of this worker.

        layout: the layouts of the result, from those of the tree and of the others.
        """
        shards = sharded_over(tree)

        def on_shard(tree: Tree, t: Array, *others: Any) -> Any:
            return fn(Codec(tree, self._wire, shards), t, tree, *others)

        def out(specs: Any, t: Any, *others: Any) -> Any:
            return layout(specs, *others)

        given = jax.tree.map(jnp.asarray, (self._t, *others))
        return shard_by_shard(on_shard, tree, *given, out=out)

    def _sums(
        self,
        codec: Codec,
        t: Array,
        v: list[Array],
        kept: WireState,
        where: Array,
        in_shares: bool,
    ) -> tuple[list[Array], Array, WireState]:
        """Σ Q(v + βe) over the workers for which `where` holds, their number, the new e.

        The error of a worker that does not take part becomes 0, except for that of the
        share of the sum that it owns.
        """
        if kept.error is None:
            raise ValueError(_KEEPS.format("'error'"))

        def owed_of(v: Array, e: Array) -> Array:
            """Sends earlier quantization errors again, so that they arrive in the end."""
            owed = widened(v) + self._wire.decay * e
            return jnp.where(where & jnp.isfinite(owed), owed, jnp.zeros_like(owed))

        owed = list(map(owed_of, v, codec.pack(kept.error)))
        add_up: Callable = self._sums_of_messages
        if in_shares:
            add_up = self._sums_of_shares
        if self._across is not self:
            add_up = functools.partial(self._sums_on_two_levels, add_up)
        sums, e, count = add_up(codec, owed, where, self._key(t))
        return sums, count, kept._replace(error=codec.unpack(e, t))

    def _sums_of_messages(
        self, codec: Codec, owed: list[Array], where: Array, key: Array | None
    ) -> Sums:
        """Of all workers' gathered messages.

        If an entry is averaged over its senders, its sum is multiplied by the number of
        workers over theirs.
        """
        wire = self._wire
        by_senders = isinstance(wire, TopK) and wire.aggregate == "senders"
        sent, given = codec.round_buffers(owed, key)
        e = list(map(jnp.subtract, owed, given))

        def read(sent: Message) -> tuple[list[Array], list[Array]]:
            values = codec.decode_buffers(sent)
            senders = codec.senders(sent) if by_senders else []
            return values, senders

        (sums, senders), count = self._gathered_sums(sent, where, read)
        if by_senders:
            sums = [
                total * (count.astype(n.dtype) / jnp.maximum(n, 1))
                for total, n in zip(sums, senders)
            ]
        return sums, e, count

    def _sums_of_shares(
        self, codec: Codec, owed: list[Array], where: Array, key: Array | None
    ) -> Sums:
        """By shares; the error of the sum of a share is its owner's."""
        coded = owed[: codec.coded]
        plain = owed[codec.coded :]
        keys = [codec.key(key, b) for b in range(codec.coded)]
        message = (plain, where.astype(jnp.float32))
        packing = Packing(message)
        beside = packing.pack(message)
        sums, errors, rows = narrow_sums.add_up(
            coded, keys, beside, self._wire, self._across
        )
        exact, count = self._added_rows(packing, rows, lambda sent: sent)
        return sums + exact, errors + list(map(jnp.zeros_like, plain)), count

    def _sums_on_two_levels(
        self, add_up: Callable, codec: Codec, owed: list[Array], where: Array, key: Any
    ) -> Sums:
        """With `add_up` across nodes only.

        With L workers in a node, the worker of index l has the l-th part of all blocks of
        the node's sum, and its error.
        """
        inside = self._inside
        coded = owed[: codec.coded]
        plain = owed[codec.coded :]
        cuts = [self._wire.cut(x.shape, inside.size) for x in coded]
        parts = inside.scatter([cut.rows(x) for cut, x in zip(cuts, coded)])
        across = Codec(parts, self._wire, codec.shards[: codec.coded])
        sums, e, _ = add_up(across, across.pack(parts), jnp.asarray(True), key)

        def in_place(part: Array) -> Array:
            nothing = jnp.zeros([inside.size, *part.shape], part.dtype)
            return lax.dynamic_update_index_in_dim(nothing, part, inside.index, 0)

        whole = inside.gather(across.unpack(sums))
        sums = [cut.array(rows) for cut, rows in zip(cuts, whole)]
        errors = [cut.array(in_place(part)) for cut, part in zip(cuts, across.unpack(e))]
        exact, count = self.add((plain, where.astype(jnp.float32)))
        return sums + exact, errors + list(map(jnp.zeros_like, plain)), count

    def _gathered_sums(
        self, sent: Message, where: Array, read: Callable[[Message], Tree]
    ) -> tuple[Tree, Array]:
        """Σ read(sent) over the workers for which `where` holds, and their number."""
        message = (sent, where.astype(jnp.float32))
        packing = Packing(message)
        rows = self._across.gather(packing.pack(message))
        return self._added_rows(packing, rows, read)

    def _added_rows(
        self, packing: Packing, rows: list[Array], read: Callable[[Message], Tree]
    ) -> tuple[Tree, Array]:
        """Σ read(sent), of all workers' packed (sent, whether it counts)."""
        # Otherwise XLA gathers them under a `jax.vmap` once for each row, in the loop.
        rows = list(map(whole_rows, rows))

        def of_worker(i: Any) -> tuple[Tree, Array]:
            row = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in rows]
            sent, weight = packing.unpack(row)
            counts = weight == 1  # nan for a worker that has failed

            def counted(q: Array) -> Array:
                return jnp.where(counts, q, jnp.zeros_like(q))

            return jax.tree.map(counted, read(sent)), counts.astype(jnp.float32)

        def add(i: Array, sums: Any) -> Any:
            return jax.tree.map(jnp.add, sums, of_worker(i))

        none = jax.tree.map(jnp.zeros_like, jax.eval_shape(of_worker, 0))
        return lax.fori_loop(0, self._across.size, add, none)

    def _remembered(
        self, codec: Codec, t: Array, z: list[Array], r: list[Array], kept: WireState
    ) -> WireState:
        """Returns the memory with z as its reference in place of r."""

        def renewed(z: Array, r: Array) -> Array:
            return z.astype(r.dtype) if is_float(z) else r

        reference = codec.unpack(list(map(renewed, z, r)), t)
        if isinstance(kept.reference, Shared):
            reference = kept.reference._replace(value=reference)
        return kept._replace(reference=reference)

    def _key(self, t: Array, number: int = 0) -> Array | None:
        """Returns this worker's random key for a message of this step."""
        wire = self._wire
        if isinstance(wire, TopK) or wire.rounding == "nearest":
            return None
        return draws(wire.seed, t, self.index, number)


_KEEPS = (
    "with a narrow wire format a rule that calls `broadcast` must keep the 'reference', "
    "and one that calls `masked_mean` or `masked_sum` the 'error': its `keeps` must have {}"
)


def _reference(kept: WireState) -> Tree:
    """r, the target agreed on last."""
    if kept.reference is None:
        raise ValueError(_KEEPS.format("'reference'"))
    return kept.reference.value if isinstance(kept.reference, Shared) else kept.reference


def _minus(v: Array, r: Array) -> Array:
    """v - r where v holds floats, otherwise v."""
    return widened(v) - r if is_float(v) else v


def _plus(v: Array, r: Array, q: Array) -> Array:
    """r + q where v holds floats, otherwise q."""
    return r + q if is_float(v) else q
