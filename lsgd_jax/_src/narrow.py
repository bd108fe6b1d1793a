"""A group whose trees travel in a narrow wire format.

One source: the integers of Q(v - r) travel, and all workers, the source too, take
z = r + Q(v - r); a sum of one value and zeros is exact. A mean: all workers' integers are
gathered and added up in one order, so that z is the same to the bit; what rounding took
away, a worker adds to what it sends next (error feedback). To peers: Q(y), and the rules
give back to the sender what rounding took away (`lost`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src import trees
from lsgd_jax._src.blocks import Blocks
from lsgd_jax._src.collectives import Group
from lsgd_jax._src.layouts import known_axes
from lsgd_jax._src.packing import Packing
from lsgd_jax._src.shared import Axes, Shared
from lsgd_jax._src.trees import Tree, widened
from lsgd_jax._src.wire import Wire


class WireState(NamedTuple):
    """What a pull with a narrow wire format remembers; None is what it does not need.

    Attributes:
      reference: r, the target agreed on last, 0 at first; a tree like the part, in float32
        at least; shared if the group is all workers, else per worker, equal in the group.
      error: e, what rounding has taken away of what this worker sent; likewise; per worker.
    """

    reference: Shared[Tree] | Tree | None
    error: Tree | None

    @classmethod
    def zero(cls, keeps: Sequence[str], axes: Axes, part: Tree) -> "WireState":
        """Before the first exchange."""
        group = Group(axes)
        nothing = jax.tree.map(lambda x: jnp.zeros_like(widened(x)), part)
        reference = group.shared(nothing) if group.is_all else nothing
        return cls(
            reference if "reference" in keeps else None,
            nothing if "error" in keeps else None,
        )

    def without_error(self, restored: Array) -> "WireState":
        """Of a worker that was restored, which owes nothing any more."""
        forget = lambda e: jnp.where(restored, 0, e)
        return self._replace(error=jax.tree.map(forget, self.error))

    def resized(self) -> "WireState":
        """For `resize`: groups other than that of all workers have nothing in common."""
        nothing = lambda tree: jax.tree.map(jnp.zeros_like, tree)
        kept = isinstance(self.reference, Shared)
        reference = self.reference if kept else nothing(self.reference)
        return WireState(reference, nothing(self.error))


class NarrowGroup(Group):
    """A group that sends trees of parameters in a narrow wire format.

    Args:
      axes: as for `Group`.
      wire: the format, not 'float32'.
      t: int32 scalar, the step.

    Attributes:
      kept: the `WireState`, replaced while tracing as messages are sent.
    """

    def __init__(self, axes: Axes, wire: Wire, t: Array):
        super().__init__(axes)
        self._wire, self._t = wire, t
        self._shard: Array | None = None  # of a worker of several devices, where known

    def broadcast(self, tree: Tree, source: Array) -> Tree:
        if not self.names:
            return super().broadcast(tree, source)

        def send(tree, kept, source):
            self.kept, blocks = kept, Blocks(tree, self._wire)
            v, r = blocks.pack(tree), blocks.pack(self._last())
            sent = blocks.encode(list(map(_minus, v, r)), self._key())
            q = blocks.decode(Group.broadcast(self, sent, source))
            return self._remembered(blocks, list(map(_plus, v, r, q)), r), self.kept

        out = lambda specs, kept, *_: (specs, kept)
        z, self.kept = self._by_shard(send, tree, self.kept, source, out=out)
        return z

    def masked_sum(self, tree: Tree, where: Array | bool = True) -> tuple[Tree, Array]:
        if not self.names:
            return super().masked_sum(tree, where)

        def add_up(tree, kept, where):
            self.kept, blocks = kept, Blocks(tree, self._wire)
            sums, count = self._sums(blocks, blocks.pack(tree), where)
            return (blocks.unpack(sums), count), self.kept

        total, self.kept = self._by_shard(add_up, tree, self.kept, where, out=_and_kept)
        return total

    def masked_mean(
        self, tree: Tree, where: Array | bool = True, reference: Tree | None = None
    ) -> tuple[Tree, Array]:
        if not self.names:
            return super().masked_mean(tree, where)

        def average(tree, kept, where, reference):
            self.kept, blocks = kept, Blocks(tree, self._wire)
            v = blocks.pack(tree)
            r = blocks.pack(self._last() if reference is None else reference)
            sums, count = self._sums(blocks, list(map(_minus, v, r)), where)
            z = list(map(_plus, v, r, trees.mean_of(sums, count)))
            if reference is None:
                return (self._remembered(blocks, z, r), count), self.kept
            return (blocks.unpack(z), count), self.kept

        given = tree, self.kept, where, reference
        mean, self.kept = self._by_shard(average, *given, out=_and_kept)
        return mean

    def lost(self, tree: Tree, turn: int = 0) -> Tree | None:
        if not self.names:
            return None

        def take_away(tree):
            blocks = Blocks(tree, self._wire)
            v = blocks.pack(tree)
            q = blocks.decode(blocks.encode(v, self._key(turn)))
            return blocks.unpack([widened(v) - q for v, q in zip(v, q)])

        return self._by_shard(take_away, tree)

    # How

    def _by_shard(
        self,
        fn: Callable,
        tree: Tree,
        *others: Any,
        out: Callable = lambda specs, *_: specs,
    ) -> Any:
        """As that of `Group`; keys are made of the step and the shard."""
        axes, before = known_axes(), (self._t, self._shard)

        def on_shard(tree, t, *others):
            self._t = t
            if axes:
                self._shard = lax.axis_index(axes)
            return fn(tree, *others)

        layout = lambda specs, _, *more: out(specs, *more)
        result = super()._by_shard(on_shard, tree, self._t, *others, out=layout)
        self._t, self._shard = before
        return result

    def _sums(
        self, blocks: Blocks, v: list[Array], where: Array
    ) -> tuple[list[Array], Array]:
        """Σ Q(v + e) over the workers `where` holds, and their number; renews e."""
        if self.kept.error is None:
            raise ValueError(_KEEPS.format("'error'"))
        take_part = lambda x: jnp.where(where & jnp.isfinite(x), x, 0)
        e = blocks.pack(self.kept.error)
        owed = [take_part(widened(v) + e) for v, e in zip(v, e)]
        sent = blocks.encode(owed, self._key())
        e = list(map(jnp.subtract, owed, blocks.decode(sent)))
        self.kept = self.kept._replace(error=blocks.unpack(e, self._t))

        message = (sent, where.astype(jnp.float32))
        packing = Packing(message)
        rows = [self.gather(buffer) for buffer in packing.pack(message)]

        def of_worker(i: Any) -> tuple[list[Array], Array]:
            row = lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False)
            sent, counts = packing.unpack([row(x) for x in rows])
            return [q * counts.astype(q.dtype) for q in blocks.decode(sent)], counts

        def add(i: Array, sums: Any) -> Any:
            return jax.tree.map(jnp.add, sums, of_worker(i))

        return lax.fori_loop(1, self.size, add, of_worker(0))

    def _last(self) -> Tree:
        """r, the target agreed on last."""
        reference = self.kept.reference
        if reference is None:
            raise ValueError(_KEEPS.format("'reference'"))
        return reference.value if isinstance(reference, Shared) else reference

    def _remembered(self, blocks: Blocks, z: list[Array], r: list[Array]) -> Tree:
        """The target z, which becomes the reference in place of r."""
        renew = lambda z, r: z.astype(r.dtype) if _is_float(z) else r
        r = blocks.unpack(list(map(renew, z, r)), self._t)
        is_shared = isinstance(self.kept.reference, Shared)
        self.kept = self.kept._replace(reference=self.shared(r) if is_shared else r)
        return blocks.unpack(z)

    def _key(self, turn: int = 0) -> Array | None:
        """The key of this worker's draws at this step."""
        if self._wire.rounding == "nearest":
            return None
        key = jax.random.key(self._wire.seed, impl="threefry2x32")
        shard = () if self._shard is None else (self._shard,)
        for number in (self._t, self.index, turn, *shard):
            key = jax.random.fold_in(key, number)
        return key

    def _encoded(self, tree: Tree, turn: int = 0) -> Tree:
        if not self.names:
            return tree
        blocks = Blocks(tree, self._wire)
        return blocks.encode(blocks.pack(tree), self._key(turn))

    def _decoded(self, sent: Tree, like: Tree) -> Tree:
        if not self.names:
            return sent
        blocks = Blocks(like, self._wire)
        return blocks.unpack(blocks.decode(sent))


_KEEPS = (
    "for a narrow wire format a rule that calls `broadcast` keeps the 'reference', one "
    "that calls `masked_mean` or `masked_sum` the 'error': its `keeps` must have {}"
)


def _and_kept(specs: Tree, kept: Tree, *_: Any) -> Any:
    """The layout of a tree like the one sent, a scalar, and what is kept."""
    return (specs, Spec()), kept


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _minus(v: Array, r: Array) -> Array:
    """v - r of floats; what has no difference worth sending stays as it is."""
    return widened(v) - r if _is_float(v) else v


def _plus(v: Array, r: Array, q: Array) -> Array:
    """r + q, of v in place of which it stands."""
    return r + q if _is_float(v) else q
