"""Trees of parameters on the wire, and the traffic of one agreement.

One source: the codes of Q(v - r) travel, and all workers, the source too, take
z = r + Q(v - r). A mean: all workers' codes are gathered, or a share of them by each worker
(see `narrow_sums`), and added up in one order, so that z is bit-identical on all workers; a
worker adds its quantization error to its next message (error feedback). To peers: Q(y), and
the rule gives the error back to the sender.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src import trees
from lsgd_jax._src.layouts import (
    known_axes,
    may_be_sharded,
    shard_by_shard,
    shard_nbytes,
)
from lsgd_jax._src.shared import Shared
from lsgd_jax._src.trees import Tree, widened
from lsgd_jax._src.wire import narrow_sums, top_k
from lsgd_jax._src.wire.packing import Packing
from lsgd_jax._src.wire.top_k import TopK
from lsgd_jax._src.wire.wire import (
    Coded,
    Runs,
    Wire,
    decode,
    decode_whole,
    encode,
    encode_whole,
)


Message = Any  # a tree of the arrays that travel


class Codec:
    """Encodes trees of one structure, packed into a few buffers.

    Small leaves lie side by side in one buffer, each from the start of a block on, so that
    no two share a scale; the zeros between them do not travel. Leaves of integers, of
    bools and of one element travel as they are: a code and its scale would be longer.
    Where leaves may be sharded each stays by itself, and keeps its shape. With 'top-k' the
    leaves of a buffer are of one size and form the rows of a matrix, encoded row by row.

    Args:
      tree: arrays.
      wire: the format.

    >>> import lsgd_jax as lj
    >>> codec = Codec(jnp.zeros(3), lj.Wire("int8"))
    >>> message, error = codec.encode(jnp.array([0.5, -1.0, 0.1]), error=jnp.zeros(3))
    >>> bool(jnp.allclose(codec.decode(message) + error, jnp.array([0.5, -1.0, 0.1])))
    True
    """

    def __init__(self, tree: Tree, wire: Wire):
        self._wire, self._whole = wire, may_be_sharded()
        narrow = wire.format != "float32"
        coded = [narrow and _is_coded(leaf) for leaf in jax.tree.leaves(tree)]
        align = wire.block if wire.format in ("int8", "int4") else 1
        sizes = [
            leaf.size * is_coded for leaf, is_coded in zip(jax.tree.leaves(tree), coded)
        ]
        self._packing = Packing(tree, sizes if wire.is_sparse else coded, align)
        self._coded = [coded[leaves[0]] for leaves in self._packing.members]
        self.pack = self._packing.pack

    @property
    def coded(self) -> list[bool]:
        """For each buffer, whether it is encoded; otherwise it travels as it is."""
        return self._coded

    def encode(
        self, tree: Tree, error: Tree | None = None, key: Array | None = None
    ) -> tuple[Message, Tree | None]:
        """Returns the message for a tree, and its quantization error.

        Args:
          tree: arrays of floats count as 0 where they are not finite.
          error: the quantization error of earlier messages, which is added to the tree.
            None: no error is kept.
          key: random key for stochastic rounding.
        """
        owed = self.pack(tree)
        if error is not None:
            owed = [widened(x) + e for x, e in zip(owed, self.pack(error))]
        message = self.encode_buffers(owed, key)
        if error is None:
            return message, None
        left = map(jnp.subtract, owed, self.decode_buffers(message))
        return message, self._packing.unpack(list(left))

    def decode(self, message: Message) -> Tree:
        """The tree that arrives, in float32 where it was rounded."""
        return self.unpack(self.decode_buffers(message))

    # On the buffers that the tree lies in

    def unpack(self, buffers: list[Array], t: Array | None = None) -> Tree:
        """The tree of the buffers; t as in `Packing.unpack`."""
        return self._packing.unpack(buffers, t=t)

    def encode_buffers(self, buffers: list[Array], key: Array | None) -> Message:
        """The message for the buffers."""

        def one(b: int, x: Array) -> Coded | TopK | Array:
            if not self._coded[b]:
                return x
            if self._wire.is_sparse:
                rows = x.reshape(len(self._packing.members[b]), -1)
                return jax.vmap(lambda row: top_k.encode(row, self._wire))(rows)
            mine = key if key is None else jax.random.fold_in(key, b)
            if self._whole:
                return encode_whole(x, self._wire, mine)
            return encode(x, self._wire, mine, self._runs(b))

        return [one(b, x) for b, x in enumerate(buffers)]

    def decode_buffers(self, message: Message) -> list[Array]:
        """The buffers that arrive."""

        def one(b: int, sent: Coded | TopK | Array) -> Array:
            if isinstance(sent, TopK):
                return self._of_rows(b, top_k.decode, sent)
            if not isinstance(sent, Coded):
                return sent
            if self._whole:
                return decode_whole(sent, self._wire, self._packing.shape(b))
            return decode(sent, self._wire, self._packing.shape(b), self._runs(b))

        return [one(b, sent) for b, sent in enumerate(message)]

    def senders(self, message: Message) -> list[Array]:
        """Buffers of 1 for the entries that are in the message, of 0 for the others."""

        def one(b: int, sent: TopK | Array) -> Array:
            if not isinstance(sent, TopK):
                return jnp.ones_like(sent)
            return self._of_rows(b, top_k.senders, sent)

        return [one(b, sent) for b, sent in enumerate(message)]

    def _of_rows(self, b: int, read: Callable, sent: TopK) -> Array:
        """The buffer of what `read` makes of the message of each of its leaves."""
        shape = self._packing.shape(b)
        size = math.prod(shape) // len(self._packing.members[b])
        rows = jax.vmap(lambda row: read(row, self._wire, size))(sent)
        return rows.reshape(shape)

    def _runs(self, b: int) -> Runs | None:
        """The runs of a buffer that travel, or None if all of it does.

        Leaves without a gap between them form one run.
        """
        runs: list[tuple[int, int]] = []
        for _, start, size in self._packing.runs(b):
            if runs and sum(runs[-1]) == start:
                start, size = runs[-1][0], runs[-1][1] + size
                runs.pop()
            runs.append((start, size))
        whole = runs == [(0, math.prod(self._packing.shape(b)))]
        return None if whole else runs


def _is_coded(x: Array) -> bool:
    return _is_float(x) and x.size > 1


class WireState(NamedTuple):
    """The memory of a pull with a narrow wire format; None where it needs none.

    Attributes:
      reference: r, the target agreed on last, 0 at first; a tree like the part, in float32
        at least; shared if the group is all workers, else per worker, equal in the group.
      error: e, the quantization error of what this worker sent; likewise; per worker.
    """

    reference: Shared[Tree] | Tree | None
    error: Tree | None

    @classmethod
    def zero(
        cls, keeps: Sequence[str], share: Callable[[Tree], Shared], part: Tree
    ) -> "WireState":
        """Returns the memory before the first exchange; `share` is `Group.shared`."""
        nothing = trees.zeros(part)
        shared = share(nothing)
        reference = shared if shared.axes is None else nothing
        return cls(
            reference if "reference" in keeps else None,
            nothing if "error" in keeps else None,
        )

    def without_error(self, restored: Array) -> "WireState":
        """Clears the error of a worker that was restored."""
        forget = lambda e: jnp.where(restored, jnp.zeros_like(e), e)
        return self._replace(error=jax.tree.map(forget, self.error))

    def __lsgd_resized__(self) -> "WireState":
        """For `resize`: keeps a reference that all workers share, and nothing else."""
        nothing = lambda tree: jax.tree.map(jnp.zeros_like, tree)
        kept = isinstance(self.reference, Shared)
        reference = self.reference if kept else nothing(self.reference)
        return WireState(reference, nothing(self.error))


class Line:
    """Carries the messages of one agreement between a rule and its group, unrounded.

    A line is made whenever an agreement is traced, so that the channel itself never
    changes. `kernel.send` reads from it how many bytes the agreement has sent.

    Args:
      channel: the group's `Channel`.

    Attributes:
      bytes_sent: bytes that this worker has sent so far; a `switch` counts as the mean of
        its branches.
      kept: the `WireState` as it is now, () without one.
    """

    def __init__(self, channel: Any, kept: Any = ()):
        self.channel, self.kept, self.bytes_sent = channel, kept, 0.0

    def gather(self, tree: Tree) -> Tree:
        self._count(tree)
        return self.channel.gather(tree)

    def transpose(self, x: Array) -> Array:
        self._count(x)
        return self.channel.transpose(x)

    def add(self, x: Array, times: int) -> Array:
        self._count([x] * times)
        return self.channel.add(x)

    def broadcast(self, tree: Tree, source: Array) -> Tree:
        self._count(tree)
        return self.channel.broadcast(tree, source)

    def sum(self, tree: Tree, where: Array) -> tuple[Tree, Array]:
        return self._total(tree, where, mean=False)

    def mean(self, tree: Tree, where: Array, reference: Tree | None) -> tuple[Tree, Array]:
        del reference
        return self._total(tree, where, mean=True)

    def permute(self, tree: Tree, permutation: Any, turn: int = 0) -> Tree:
        del turn
        return self._permuted(tree, permutation)

    def quantization_error(self, tree: Tree, turn: int = 0) -> Tree | None:
        del tree, turn
        return None

    def switch(self, r: Array, branches: Sequence[Callable], operand: Any) -> Any:
        if len(branches) == 1:
            return branches[0](operand)
        before, sent = self.bytes_sent, {}

        def counting(i: int, branch: Callable) -> Callable:
            def run(operand: Any) -> Any:
                self.bytes_sent = 0.0
                result = branch(operand)
                sent[i] = self.bytes_sent
                return result

            return run

        counted = [counting(i, branch) for i, branch in enumerate(branches)]
        result = self.channel.switch(r, counted, operand)
        self.bytes_sent = before + sum(sent.values()) / max(len(sent), 1)
        return result

    def _total(self, tree: Tree, where: Array, mean: bool) -> tuple[Tree, Array]:
        self._count((trees.widen(tree), jnp.float32(0)))  # the number of workers, too
        return self.channel.sum(tree, where, mean)

    def _permuted(self, tree: Tree, permutation: Any) -> Tree:
        is_detour = isinstance(permutation, Array) and self.channel.transposes
        travels = 2 if is_detour else 1  # see `MeshChannel.permute`
        self._count([tree] * travels)
        return self.channel.permute(tree, permutation)

    def _count(self, tree: Tree) -> None:
        if self.channel.size > 1:
            self.bytes_sent += shard_nbytes(tree)


class NarrowLine(Line):
    """A line on which trees of parameters travel in a narrow wire format.

    Args:
      channel: the group's `Channel`.
      kept: the pull's `WireState`.
      wire: the format, not 'float32'.
      t: int32 scalar, the step, from which random keys are derived.
    """

    def __init__(self, channel: Any, kept: WireState, wire: Wire, t: Array):
        super().__init__(channel, kept)
        self._wire, self._t = wire, t
        self._shard: Array | None = None  # the device's index in a sharded worker
        self._keeps_one = False

    def broadcast(self, tree: Tree, source: Array) -> Tree:
        self._keep_one()
        if self.channel.size == 1:
            return super().broadcast(tree, source)

        def send(tree: Tree, kept: WireState, source: Array) -> Any:
            codec = Codec(tree, self._wire)
            v, r = codec.pack(tree), codec.pack(_reference(kept))
            message = codec.encode_buffers(list(map(_minus, v, r)), self._key())
            self._count(message)
            q = codec.decode_buffers(self.channel.broadcast(message, source))
            return self._remembered(codec, list(map(_plus, v, r, q)), r, kept)

        out = lambda specs, kept, *_: (specs, kept)
        z, self.kept = self._by_shard(send, tree, self.kept, source, out=out)
        return z

    def sum(self, tree: Tree, where: Array) -> tuple[Tree, Array]:
        self._keep_one()
        if self._adds_exactly:
            return super().sum(tree, where)
        in_shares = self._in_shares(tree)

        def add_up(tree: Tree, kept: WireState, where: Array) -> Any:
            codec = Codec(tree, self._wire)
            sums, count, kept = self._sums(codec, codec.pack(tree), kept, where, in_shares)
            return (codec.unpack(sums), count), kept

        total, self.kept = self._by_shard(add_up, tree, self.kept, where, out=_and_kept)
        return total

    def mean(self, tree: Tree, where: Array, reference: Tree | None) -> tuple[Tree, Array]:
        self._keep_one()
        if self._adds_exactly:
            return super().mean(tree, where, reference)
        in_shares = self._in_shares(tree)

        def average(tree: Tree, kept: WireState, where: Array, reference: Any) -> Any:
            codec = Codec(tree, self._wire)
            v = codec.pack(tree)
            r = codec.pack(_reference(kept) if reference is None else reference)
            gaps = list(map(_minus, v, r))
            sums, count, kept = self._sums(codec, gaps, kept, where, in_shares)
            z = list(map(_plus, v, r, trees.mean_of(sums, count)))
            if reference is not None:
                return (codec.unpack(z), count), kept
            z, kept = self._remembered(codec, z, r, kept)
            return (z, count), kept

        given = tree, self.kept, where, reference
        mean, self.kept = self._by_shard(average, *given, out=_and_kept)
        return mean

    def permute(self, tree: Tree, permutation: Any, turn: int = 0) -> Tree:
        if self.channel.size == 1:
            return super().permute(tree, permutation, turn)

        def send(tree: Tree) -> Tree:
            codec = Codec(tree, self._wire)
            message, _ = codec.encode(tree, key=self._key(turn))
            return codec.decode(self._permuted(message, permutation))

        return self._by_shard(send, tree)

    def quantization_error(self, tree: Tree, turn: int = 0) -> Tree | None:
        if self.channel.size == 1:
            return None

        def error(tree: Tree) -> Tree:
            codec = Codec(tree, self._wire)
            return codec.encode(tree, trees.zeros(tree), self._key(turn))[1]

        return self._by_shard(error, tree)

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

    @property
    def _adds_exactly(self) -> bool:
        """Whether a sum needs no message; a worker alone holds back what 'top-k' does."""
        return self.channel.size == 1 and not self._wire.is_sparse

    def _in_shares(self, tree: Tree) -> bool:
        """Whether a sum is taken by shares in place of a gather, which any channel has."""
        if self._wire.is_sparse or not self.channel.transposes:
            return False
        if may_be_sharded() and not known_axes():
            return False  # a share would cut shards
        coded = list(filter(_is_coded, jax.tree.leaves(tree)))
        return narrow_sums.pays(coded, self._wire, self.channel.size)

    def _by_shard(
        self,
        fn: Callable,
        tree: Tree,
        *others: Any,
        out: Callable = lambda specs, *_: specs,
    ) -> Any:
        """Runs fn(tree, *others) shard by shard; random keys depend on step and shard."""
        axes, before = known_axes(), (self._t, self._shard)

        def on_shard(tree: Tree, t: Array, *others: Any) -> Any:
            self._t = t
            if axes:
                self._shard = lax.axis_index(axes)
            return fn(tree, *others)

        layout = lambda specs, _, *more: out(specs, *more)
        given = jax.tree.map(jnp.asarray, (self._t, *others))
        result = shard_by_shard(on_shard, tree, *given, out=layout)
        self._t, self._shard = before
        return result

    def _sums(
        self,
        codec: Codec,
        v: list[Array],
        kept: WireState,
        where: Array,
        in_shares: bool,
    ) -> tuple[list[Array], Array, WireState]:
        """Σ Q(v + βe) over the workers for which `where` holds, their number, the new e.

        The error of a worker that does not take part becomes 0, except for that of the
        share of the sum that it owns. If an entry is averaged over its senders, its sum is
        multiplied by the number of workers over theirs.
        """
        if kept.error is None:
            raise ValueError(_KEEPS.format("'error'"))
        take_part = lambda x: jnp.where(where & jnp.isfinite(x), x, jnp.zeros_like(x))
        decay = self._wire.decay
        e = codec.pack(kept.error)
        owed = [take_part(widened(v) + decay * e) for v, e in zip(v, e)]
        if in_shares:
            sums, e, count = self._sums_of_shares(codec, owed, where)
        else:
            sums, e, count = self._sums_of_messages(codec, owed, where)
        return sums, count, kept._replace(error=codec.unpack(e, self._t))

    def _sums_of_messages(
        self, codec: Codec, owed: list[Array], where: Array
    ) -> tuple[list[Array], list[Array], Array]:
        """Sums of all workers' gathered messages, the errors, and the number of workers."""
        by_senders = self._wire.is_sparse and self._wire.aggregate == "senders"
        sent = codec.encode_buffers(owed, self._key())
        e = list(map(jnp.subtract, owed, codec.decode_buffers(sent)))

        def read(sent: Message) -> tuple[list[Array], list[Array]]:
            return codec.decode_buffers(sent), codec.senders(sent) if by_senders else []

        (sums, senders), count = self._gathered_sums(sent, where, read)
        if by_senders:
            share = lambda n: count.astype(n.dtype) / jnp.maximum(n, 1)
            sums = [s * share(n) for s, n in zip(sums, senders)]
        return sums, e, count

    def _sums_of_shares(
        self, codec: Codec, owed: list[Array], where: Array
    ) -> tuple[list[Array], list[Array], Array]:
        """The same by shares; the error of the sum of a share is its owner's."""
        buffers = [x for x, coded in zip(owed, codec.coded) if coded]
        plain = [x for x, coded in zip(owed, codec.coded) if not coded]
        key = self._key()
        of_buffer = lambda b: None if key is None else jax.random.fold_in(key, b)
        keys = list(map(of_buffer, range(len(buffers) + 1)))
        sums, errors = map(iter, narrow_sums.add_up(buffers, self._wire, keys, self))
        exact, count = self._gathered_sums(plain, where, lambda sent: sent)
        exact, none = iter(exact), iter(list(map(jnp.zeros_like, plain)))
        merge = lambda these, those: [next(these if c else those) for c in codec.coded]
        return merge(sums, exact), merge(errors, none), count

    def _gathered_sums(
        self, sent: Message, where: Array, read: Callable[[Message], Tree]
    ) -> tuple[Tree, Array]:
        """Σ read(sent) over the workers for which `where` holds, and their number."""
        message = (sent, where.astype(jnp.float32))
        packing = Packing(message)
        rows = self.gather(packing.pack(message))

        def of_worker(i: Any) -> tuple[Tree, Array]:
            row = lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False)
            sent, gives = packing.unpack([row(x) for x in rows])
            gives = gives == 1  # nan for a worker that has failed
            add = lambda q: jnp.where(gives, q, jnp.zeros_like(q))
            return jax.tree.map(add, read(sent)), gives.astype(jnp.float32)

        def add(i: Array, sums: Any) -> Any:
            return jax.tree.map(jnp.add, sums, of_worker(i))

        none = jax.tree.map(jnp.zeros_like, jax.eval_shape(of_worker, 0))
        return lax.fori_loop(0, self.channel.size, add, none)

    def _remembered(
        self, codec: Codec, z: list[Array], r: list[Array], kept: WireState
    ) -> tuple[Tree, WireState]:
        """Returns the tree of z, and the memory with z as its reference in place of r."""
        renew = lambda z, r: z.astype(r.dtype) if _is_float(z) else r
        r = codec.unpack(list(map(renew, z, r)), self._t)
        shared = kept.reference
        reference = shared._replace(value=r) if isinstance(shared, Shared) else r
        return codec.unpack(z), kept._replace(reference=reference)

    def _key(self, turn: int = 0) -> Array | None:
        """Returns this worker's random key for a message of this step."""
        if self._wire.rounding == "nearest":
            return None
        shard = () if self._shard is None else (self._shard,)
        return draws(self._wire, self._t, self.channel.index, turn, *shard)


def draws(wire: Wire, *numbers: Any) -> Array:
    """Returns the random key of a message, from the format's seed and some numbers."""
    fold = jax.random.fold_in
    return functools.reduce(fold, numbers, jax.random.key(wire.seed, impl="threefry2x32"))


_KEEPS = (
    "with a narrow wire format a rule that calls `broadcast` must keep the 'reference', "
    "and one that calls `masked_mean` or `masked_sum` the 'error': its `keeps` must have {}"
)


def _reference(kept: WireState) -> Tree:
    """r, the target agreed on last."""
    if kept.reference is None:
        raise ValueError(_KEEPS.format("'reference'"))
    return kept.reference.value if isinstance(kept.reference, Shared) else kept.reference


def _and_kept(specs: Tree, kept: Tree, *_: Any) -> Any:
    """The layout of a tree like the one sent, a scalar, and the state."""
    return (specs, Spec()), kept


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _minus(v: Array, r: Array) -> Array:
    """v - r where v holds floats, otherwise v."""
    return widened(v) - r if _is_float(v) else v


def _plus(v: Array, r: Array, q: Array) -> Array:
    """r + q where v holds floats, otherwise q."""
    return r + q if _is_float(v) else q
