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

from lsgd_jax._src.axis_names import bound, names_here, parts_of
from lsgd_jax._src.checks import check_auto_mesh
from lsgd_jax._src.layouts import shard_by_shard
from lsgd_jax._src.packing import Packing
from lsgd_jax._src.permutation import Permutation, check_permutation, send_along
from lsgd_jax._src.shared import WORKER_AXES, Axes, Shared, shared
from lsgd_jax._src.trees import Tree, nbytes, widened


# The layout of what is made of a tree: one like it, and a scalar.
AND_A_SCALAR = lambda specs, *_: (specs, Spec())


class Group:
    """The workers along some mesh axes, as one of them sees them where it is traced.

    Args:
      axes: one name or several, as they are bound by `Workers.map` or `jax.shard_map`.

    Attributes:
      axes: these names.
      bytes_sent: bytes that this worker has sent so far, counted while
        tracing; of the branches of a `switch` their mean.
      kept: what it remembers of what was sent, where a narrow wire format needs it.

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
        self.kept: Any = ()

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
        """All workers' x, stacked in the order of `index`: shape [size, ...]."""
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

        def send(tree, source):
            mine = self.index == source
            # `where` and not a product: 0 * nan would leak the others' nan into the sum.
            return self._packed(lambda x: lax.psum(jnp.where(mine, x, 0), self.names), tree)

        return self._by_shard(send, tree, source)

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

        return self._by_shard(add_up, tree, where, out=AND_A_SCALAR)

    def masked_mean(
        self,
        tree: Tree,
        where: jax.Array | bool = True,
        reference: Tree | None = None,
    ) -> tuple[Tree, jax.Array]:
        """The same, with the mean in place of the sum; nan if no worker takes part.

        Args:
          tree, where: as for `masked_sum`.
          reference: a tree that is equal in the group, close to what travels, in float32
            at least: a narrow wire format sends differences to it. None: to the last mean.
        """
        del reference  # all digits travel

        def average(tree, where):
            packing, sums = self._masked_sums(tree, where)
            _, count = packing.unpack(sums)
            means, _ = packing.unpack([s / count.astype(s.dtype) for s in sums])
            return means, count

        return self._by_shard(average, tree, where, out=AND_A_SCALAR)

    def mean(self, tree: Tree) -> Tree:
        """The mean of all workers' trees, worked out in float32 at least."""
        means, _ = self.masked_mean(tree)
        return jax.tree.map(lambda m, x: m.astype(x.dtype), means, tree)

    def permute(self, tree: Tree, permutation: Permutation, turn: int = 0) -> Tree:
        """Each worker's tree sent along a permutation of the group.

        Args:
          tree: what to send; varying.
          permutation: pairs (source, destination) of indices in the group, every source and
            every destination at most once.
          turn: which message of this exchange it is; stochastic rounding draws anew.

        Returns:
          The tree of this worker's source; zeros for a worker that is no destination. With
          a narrow wire format in float32 at least.

        Raises:
          ValueError: two pairs share a source or a destination, or an index is outside.
        """

        def send(tree):
            sent = self._encoded(tree, turn)
            return self._decoded(self._permuted(sent, permutation), tree)

        return self._by_shard(send, tree)

    def lost(self, tree: Tree, turn: int = 0) -> Tree | None:
        """What of a tree does not arrive if it is permuted or pushed: None if all arrives.

        A rule whose messages take something away from their sender gives this back to it.
        """
        del tree, turn
        return None

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

        def along(permutations, tree):
            def send(message):
                sums = jax.tree.map(lambda x: jnp.zeros_like(widened(x)), tree)
                mass = jnp.zeros_like(message[1])
                for permutation in permutations:
                    sent, m = self._permuted(message, permutation)
                    arrived = self._decoded(sent, tree)
                    weighed = jax.tree.map(
                        lambda x, m=m: m.astype(widened(x).dtype) * widened(x), arrived
                    )
                    sums, mass = jax.tree.map(jnp.add, (sums, mass), (weighed, m))
                return sums, mass

            return send

        def send_all(tree, weight, r):
            message = (self._encoded(tree), weight)
            return self.switch(r, [along(each, tree) for each in rounds], message)

        return self._by_shard(send_all, tree, weight, r, out=AND_A_SCALAR)

    def coordinatewise(
        self, rule: Callable[..., jax.Array], tree: Tree, *scalars: Any
    ) -> Tree:
        """A rule [W, n] -> [n] over the group's W values, applied to every coordinate.

        The rule sees float32 at least, and the scalars (what is traced cannot come in a
        closure); the result is in the dtypes of the tree.
        """

        def collect(tree, *scalars):
            apply = lambda x: rule(widened(self.gather(x)), *scalars).astype(x.dtype)
            return self._packed(apply, tree, counted=True)

        return self._by_shard(collect, tree, *scalars)

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

    def _by_shard(
        self,
        fn: Callable,
        tree: Tree,
        *others: Any,
        out: Callable = lambda specs, *_: specs,
    ) -> Any:
        """fn(tree, *others) by `shard_by_shard`. What is traced comes as an argument."""
        return shard_by_shard(fn, tree, *jax.tree.map(jnp.asarray, others), out=out)

    def _encoded(self, tree: Tree, turn: int = 0) -> Tree:
        """The tree as it travels to peers."""
        del turn
        return tree

    def _decoded(self, sent: Tree, like: Tree) -> Tree:
        """What is read of a tree that has traveled; `like` is of the shapes it had."""
        del like
        return sent

    def _permuted(self, tree: Tree, permutation: Permutation) -> Tree:
        check_permutation(permutation, self.size)
        devices, slots = self._devices_and_slots()
        along = lambda x: send_along(x, permutation, devices, Group(slots))
        return self._packed(along, tree)

    def _masked_sums(self, tree: Tree, where: jax.Array) -> tuple[Packing, list[jax.Array]]:
        """The buffers of (sums, count), and how to unpack them."""
        summed = (jax.tree.map(widened, tree), where.astype(jnp.float32))
        self._count(summed)
        packing = Packing(summed)
        add_up = lambda buffer: lax.psum(jnp.where(where, buffer, 0), self.names)
        return packing, list(map(add_up, packing.pack(summed)))

    def _count(self, tree: Tree) -> None:
        if self.names:
            self.bytes_sent += nbytes(tree)

    def _devices_and_slots(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the axes across devices, and of those inside a device (vmapped)."""
        across = jax.sharding.get_abstract_mesh().axis_names
        names = self.names
        return (
            tuple(name for name in names if name in across),
            tuple(name for name in names if name not in across),
        )

    def _packed(
        self, collective: Callable[[jax.Array], jax.Array], tree: Tree, counted=False
    ) -> Tree:
        """The collective, applied to a few buffers in place of the leaves."""
        if not counted:
            self._count(tree)
        packing = Packing(tree)
        return packing.unpack([collective(buffer) for buffer in packing.pack(tree)])
