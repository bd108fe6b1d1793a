"""What a group of workers can do together: elect, broadcast, sum, mean, permute, push.

Everything is written for ONE worker, which names its group by mesh axes. Small leaves of a
tree travel packed into one buffer per dtype, because the cost of a collective is per call.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._axis_names import bound, names_here, parts_of
from lsgd_jax._layouts import shard_by_shard
from lsgd_jax.checks import check_auto_mesh
from lsgd_jax.packing import Packing
from lsgd_jax.shared import WORKER_AXES, Axes, Shared, shared
from lsgd_jax.trees import Tree, nbytes, widened


Permutation = Sequence[tuple[int, int]]


class Group:
    """The workers along some mesh axes, as one of them sees them where it is traced.

    Args:
      axes: one name or several, as they are bound by `Workers.map` or `jax.shard_map`.

    Attributes:
      axes: these names.
      bytes_sent: bytes that this worker has sent so far, counted while
        tracing; of the branches of a `switch` their mean.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> mean = workers.map(lambda x: lj.Group("local").mean(x))
    >>> mean(workers.put(jnp.array([1.0, 4.0]))).tolist()
    [2.5, 2.5]
    """

    def __init__(self, axes: Axes):
        self.axes: tuple[str, ...] = (axes,) if isinstance(axes, str) else tuple(axes)
        self.bytes_sent = 0.0

    # Who is there

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which JAX knows the axes here, without those of size 1."""
        check_auto_mesh()
        return names_here(self.axes)

    @property
    def size(self) -> int:
        """The number of workers in the group."""
        return math.prod(lax.axis_size(name) for name in self.names)

    @property
    def index(self) -> jax.Array:
        """This worker's index in the group, row-major over the axes: int32, varying."""
        position = jnp.int32(0)
        for name in self.names:
            position = position * lax.axis_size(name) + lax.axis_index(name)
        return position

    @property
    def is_all(self) -> bool:
        """Whether the group is all workers of the node × local grid."""
        others = [axis for axis in WORKER_AXES if axis not in self.axes]
        parts = itertools.chain(*map(parts_of, others))
        return math.prod(lax.axis_size(part) for part in parts if bound(part)) == 1

    def shared(self, tree: Tree) -> Shared:
        """Marks a tree as equal in the group."""
        return shared(tree, self.axes, self.is_all)

    # What travels

    def gather(self, x: jax.Array) -> jax.Array:
        """All workers' x, stacked in the order of `index`: shape (size, *x.shape)."""
        self._count(x)
        devices, slots = self._devices_and_slots()
        # One axis at a time, the innermost first: vmapped axes know no other way.
        stacked = x
        for name in reversed(slots):
            stacked = lax.all_gather(stacked, name)
        if devices:
            stacked = lax.all_gather(stacked, devices)
        return stacked.reshape(self.size, *x.shape)

    def elect(self, score: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The worker with the lowest score of the group, ties to the lowest index.

        Args:
          score: float scalar, varying. One that is not finite is never elected.

        Returns:
          (leader, found): its index in the group (int32), and whether any worker had a
          finite score (bool). Both are the same for the whole group.
        """
        # A nan would win: argmin returns the first one.
        scores = self.gather(jnp.where(jnp.isfinite(score), score, jnp.inf))
        return jnp.argmin(scores).astype(jnp.int32), jnp.isfinite(scores).any()

    def broadcast(self, tree: Tree, source: jax.Array) -> Tree:
        """The tree of worker `source` (an index in the group), sent to the whole group."""
        # `where` and not a product: 0 * nan would leak the others' nan into the sum.
        send = lambda x, mine: self._psum(jnp.where(mine, x, 0))
        return self._packed(send, tree, self.index == source)

    def masked_sum(
        self, tree: Tree, where: jax.Array | bool = True
    ) -> tuple[Tree, jax.Array]:
        """The sum of the trees of the workers `where` (bool, varying) holds.

        Args:
          tree: what to add up; varying. What is masked out may be nan or inf.
          where: whether this worker takes part.

        Returns:
          (sums, count): a tree in float32 at least, and how many took part (float32
          scalar). Both are the same for the whole group, and travel together.
        """

        def add_up(tree, where):
            packing, sums = self._masked_sums(tree, where)
            return packing.unpack(sums)

        return _with_a_scalar(add_up, tree, where)

    def masked_mean(
        self, tree: Tree, where: jax.Array | bool = True
    ) -> tuple[Tree, jax.Array]:
        """The same, with the mean in place of the sum; nan if no worker takes part."""

        def average(tree, where):
            packing, sums = self._masked_sums(tree, where)
            _, count = packing.unpack(sums)
            means, _ = packing.unpack([s / count.astype(s.dtype) for s in sums])
            return means, count

        return _with_a_scalar(average, tree, where)

    def mean(self, tree: Tree) -> Tree:
        """The mean of all workers' trees, worked out in float32 at least."""
        means, _ = self.masked_mean(tree)
        return jax.tree.map(lambda m, x: m.astype(x.dtype), means, tree)

    def permute(self, tree: Tree, permutation: Permutation) -> Tree:
        """Each worker's tree sent along a permutation of the group.

        Args:
          tree: what to send; varying.
          permutation: pairs (source, destination) of indices in the group, every source and
            every destination at most once.

        Returns:
          The tree of this worker's source; zeros for a worker that is no destination.

        Raises:
          ValueError: two pairs share a source or a destination, or an index is outside.
        """
        self._check(permutation)
        devices, slots = self._devices_and_slots()
        return self._packed(lambda x: self._ppermute(x, permutation, devices, slots), tree)

    def push(
        self,
        tree: Tree,
        weight: jax.Array,
        rounds: Sequence[Sequence[Permutation]],
        r: jax.Array,
    ) -> tuple[Tree, jax.Array]:
        """Each worker's tree and weight sent to its out-neighbors in one round of a graph.

        Args:
          tree: what to send, finite; varying.
          weight: float scalar; varying.
          rounds: of each round the permutations it is made of, as for `permute`.
          r: int32 scalar, the round; the same for the whole group.

        Returns:
          (sums, mass): over this worker's in-neighbors j, Σ weight_j · tree_j (in float32
          at least) and Σ weight_j; zeros where none sends.
        """

        def send_along(permutations):
            def send(message):
                sums = jax.tree.map(lambda x: jnp.zeros_like(widened(x)), message[0])
                mass = jnp.zeros_like(message[1])
                for permutation in permutations:
                    arrived, m = self.permute(message, permutation)
                    weighed = jax.tree.map(
                        lambda x, m=m: m.astype(widened(x).dtype) * widened(x), arrived
                    )
                    sums, mass = jax.tree.map(jnp.add, (sums, mass), (weighed, m))
                return sums, mass

            return send

        return self.switch(r, [send_along(each) for each in rounds], (tree, weight))

    def coordinatewise(
        self, rule: Callable[..., jax.Array], tree: Tree, *scalars: Any
    ) -> Tree:
        """A rule [W, n] -> [n] over the group's W values, applied to every coordinate.

        The rule sees float32 at least, and the scalars (what is traced cannot come in a
        closure); the result is in the dtypes of the tree.
        """

        def collect(x, *scalars):
            return rule(widened(self.gather(x)), *scalars).astype(x.dtype)

        return self._packed(collect, tree, *scalars, counted=True)

    def switch(self, r: jax.Array, branches: Sequence[Callable], operand: Any) -> Any:
        """`lax.switch` among branches that communicate; r is the same for the group."""
        if len(branches) == 1:
            return branches[0](operand)
        before, counts = self.bytes_sent, {}

        def counting(i, branch):
            def run(operand):
                with self.counted() as sent:
                    result = branch(operand)
                counts[i] = sent()
                return result

            return run

        result = lax.switch(r, [counting(i, b) for i, b in enumerate(branches)], operand)
        self.bytes_sent = before + sum(counts.values()) / len(branches)
        return result

    def bernoulli(
        self, probability: jax.Array | float, seed: int, t: jax.Array
    ) -> jax.Array:
        """This worker's draw at step t: bool scalar, varying, true with `probability`."""
        key = jax.random.fold_in(jax.random.key(seed), t)
        return jax.random.bernoulli(jax.random.fold_in(key, self.index), probability)

    @contextlib.contextmanager
    def counted(self) -> Iterator[Callable[[], float]]:
        """Yields a function that says how many bytes were sent in the `with` block."""
        before = self.bytes_sent
        yield lambda: self.bytes_sent - before

    # How

    def _masked_sums(self, tree: Tree, where: jax.Array) -> tuple[Packing, list[jax.Array]]:
        """The buffers of (sums, count), and how to unpack them."""
        summed = (jax.tree.map(widened, tree), where.astype(jnp.float32))
        self._count(summed)
        packing = Packing(summed)
        add_up = lambda buffer: self._psum(jnp.where(where, buffer, 0))
        return packing, list(map(add_up, packing.pack(summed)))

    def _count(self, tree: Tree) -> None:
        if self.names:
            self.bytes_sent += nbytes(tree)

    def _psum(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, self.names)

    def _check(self, permutation: Permutation) -> None:
        for side, indices in zip(("source", "destination"), zip(*permutation)):
            if len(set(indices)) < len(indices):
                raise ValueError(f"every {side} may occur once, got {permutation=}")
            if not all(0 <= i < self.size for i in indices):
                raise ValueError(
                    f"indices must lie in 0..{self.size - 1} for a group of {self.size} "
                    f"workers, got {permutation=}"
                )

    def _ppermute(
        self,
        x: jax.Array,
        permutation: Permutation,
        devices: tuple[str, ...],
        slots: tuple[str, ...],
    ) -> jax.Array:
        """`lax.ppermute` over a group of devices with several workers (slots) each."""
        if not slots:
            return lax.ppermute(x, devices, permutation) if devices else x
        inside = Group(slots)
        lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for source, target in permutation:
            (d, s), (e, t) = divmod(source, inside.size), divmod(target, inside.size)
            lanes.setdefault((s, t), []).append((d, e))
        rows = inside.gather(x)  # every slot of this device
        arrived = jnp.zeros_like(rows)
        for (s, t), pairs in lanes.items():
            row = lax.ppermute(rows[s], devices, pairs) if devices else rows[s]
            arrived = arrived.at[t].add(row)
        return arrived[inside.index]

    def _devices_and_slots(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the axes across devices, and of those inside a device (vmapped)."""
        across = jax.sharding.get_abstract_mesh().axis_names
        names = self.names
        return (
            tuple(name for name in names if name in across),
            tuple(name for name in names if name not in across),
        )

    def _packed(
        self, collective: Callable, tree: Tree, *scalars: Any, counted: bool = False
    ) -> Tree:
        """The collective, applied to a few buffers in place of the leaves."""

        def send(tree: Tree, *scalars: jax.Array) -> Tree:
            if not counted:
                self._count(tree)
            packing = Packing(tree)
            buffers = [collective(buffer, *scalars) for buffer in packing.pack(tree)]
            return packing.unpack(buffers)

        scalars = tuple(map(jnp.asarray, scalars))
        return shard_by_shard(send, tree, *scalars, out=lambda specs, *_: specs)


def _with_a_scalar(fn: Callable, tree: Tree, scalar: Any) -> tuple[Tree, jax.Array]:
    """fn(tree, scalar) -> (tree, scalar), by each device on its shards."""
    out = lambda specs, _: (specs, Spec())
    return shard_by_shard(fn, tree, jnp.asarray(scalar), out=out)
