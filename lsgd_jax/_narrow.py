"""A group whose trees travel in a narrow wire format.

One source: the integers of Q(v - r) travel, and all workers, the source too, take
z = r + Q(v - r); a sum of one value and zeros is exact. A mean: all workers' integers are
gathered and added up in one order, so that z is the same to the bit; what rounding took
away, a worker adds to what it sends next (error feedback). To peers: Q(y), and the rules
give back to the sender what rounding took away (`lost`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from lsgd_jax import trees
from lsgd_jax.collectives import Group
from lsgd_jax.packing import Packing
from lsgd_jax.shared import Axes, Shared
from lsgd_jax.trees import Tree, widened
from lsgd_jax.wire import Coded, Wire, decode, encode


class WireState(NamedTuple):
    """What a pull with a narrow wire format remembers; () is what it does not need.

    Attributes:
      reference: r, the target agreed on last, 0 at first; a tree like the part, in float32
        at least; shared if the group is all workers, else per worker, equal in the group.
      error: e, what rounding has taken away of what this worker sent; likewise; per worker.
    """

    reference: Shared[Tree] | Tree
    error: Tree

    @classmethod
    def zero(cls, keeps: Sequence[str], axes: Axes, part: Tree) -> "WireState":
        """Before the first exchange."""
        group = Group(axes)
        nothing = lambda: jax.tree.map(lambda x: jnp.zeros_like(widened(x)), part)
        reference = nothing() if "reference" in keeps else ()
        if reference != () and group.is_all:
            reference = group.shared(reference)
        return cls(reference, nothing() if "error" in keeps else ())

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

    def broadcast(self, tree: Tree, source: Array) -> Tree:
        if not self.names:
            return super().broadcast(tree, source)
        r = self._last()
        sent = self._encoded(_minus(tree, r))
        arrived = self._decoded(super().broadcast(sent, source), tree)
        return self._remembered(_plus(tree, r, arrived), tree)

    def masked_sum(self, tree: Tree, where: Array | bool = True) -> tuple[Tree, Array]:
        if not self.names:
            return super().masked_sum(tree, where)
        return self._sums(tree, jnp.asarray(where))

    def masked_mean(
        self, tree: Tree, where: Array | bool = True, reference: Tree | None = None
    ) -> tuple[Tree, Array]:
        if not self.names:
            return super().masked_mean(tree, where)
        r = self._last() if reference is None else reference
        sums, count = self._sums(_minus(tree, r), jnp.asarray(where))
        z = _plus(tree, r, trees.mean_of(sums, count))
        return self._remembered(z, tree) if reference is None else z, count

    def lost(self, tree: Tree, turn: int = 0) -> Tree | None:
        if not self.names:
            return None
        arrives = self._decoded(self._encoded(tree, turn), tree)
        return jax.tree.map(lambda x, q: widened(x) - q, tree, arrives)

    # How

    def _sums(self, tree: Tree, where: Array) -> tuple[Tree, Array]:
        """Σ Q(v + e) over the workers `where` holds, and their number; renews e."""
        if self.kept.error == ():
            raise ValueError(_KEEPS.format("'error'"))
        keep = lambda v: jnp.where(where & jnp.isfinite(v), v, 0)
        owed = jax.tree.map(lambda v, e: keep(widened(v) + e), tree, self.kept.error)
        sent = self._encoded(owed, like=tree)
        error = jax.tree.map(jnp.subtract, owed, self._decoded(sent, owed))
        self.kept = self.kept._replace(error=error)

        message = (sent, where.astype(jnp.float32))
        packing = Packing(message)
        rows = [self.gather(buffer) for buffer in packing.pack(message)]

        def of_worker(i: Any) -> tuple[Tree, Array]:
            row = lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False)
            coded, counts = packing.unpack([row(x) for x in rows])
            q = self._decoded(coded, owed)
            return jax.tree.map(lambda q: q * counts.astype(q.dtype), q), counts

        def add(i: Array, sums: Any) -> Any:
            return jax.tree.map(jnp.add, sums, of_worker(i))

        return lax.fori_loop(1, self.size, add, of_worker(0))

    def _last(self) -> Tree:
        """r, the target agreed on last."""
        reference = self.kept.reference
        if reference == ():
            raise ValueError(_KEEPS.format("'reference'"))
        return reference.value if isinstance(reference, Shared) else reference

    def _remembered(self, z: Tree, like: Tree) -> Tree:
        """The target z, which becomes the reference; `like` has the parameters' dtypes."""
        renew = lambda z, r, x: z.astype(r.dtype) if _is_float(x) else r
        r = jax.tree.map(renew, z, self._last(), like)
        is_shared = isinstance(self.kept.reference, Shared)
        self.kept = self.kept._replace(reference=self.shared(r) if is_shared else r)
        return z

    def _encoded(self, tree: Tree, turn: int = 0, like: Tree | None = None) -> Tree:
        if not self.names:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        keys: list[Any] = [None] * len(leaves)
        if self._wire.rounding == "stochastic":
            key = jax.random.key(self._wire.seed, impl="threefry2x32")
            for number in (self._t, self.index, turn):
                key = jax.random.fold_in(key, number)
            keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
        coded = map(_is_coded, leaves if like is None else jax.tree.leaves(like))
        code = lambda x, key, yes: encode(x, self._wire, key) if yes else x
        return treedef.unflatten(map(code, leaves, keys, coded))

    def _decoded(self, sent: Tree, like: Tree) -> Tree:
        whole = lambda x, c: decode(c, self._wire, x.shape) if isinstance(c, Coded) else c
        return jax.tree.map(whole, like, sent)


_KEEPS = (
    "for a narrow wire format a rule that calls `broadcast` keeps the 'reference', one "
    "that calls `masked_mean` or `masked_sum` the 'error': its `keeps` must have {}"
)


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_coded(x: Array) -> bool:
    """Whether a leaf is encoded: one element and its scale would be longer than it is."""
    return _is_float(x) and x.size > 1


def _minus(tree: Tree, r: Tree) -> Tree:
    return jax.tree.map(lambda v, r: widened(v) - r if _is_float(v) else v, tree, r)


def _plus(tree: Tree, r: Tree, q: Tree) -> Tree:
    return jax.tree.map(lambda v, r, q: r + q if _is_float(v) else q, tree, r, q)
