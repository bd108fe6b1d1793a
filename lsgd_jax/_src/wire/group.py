"""Group: the workers of one agreement, and the channel that carries their messages.

All code is written for ONE worker, which names its group by mesh axes. A channel has two
forms: collectives inside one compiled program (`collectives.MeshChannel`), and messages
between asynchronous workers (`asynchronous.messages.MessageChannel`). Neither changes while
a rule is traced. A `Group` is made for every agreement, and counts its bytes; an
`EncodedGroup` also has its memory.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lsgd_jax._src.checks import check_all_auto
from lsgd_jax._src.explicit import with_automatic_axes
from lsgd_jax._src.layouts import shard_by_shard, shard_nbytes
from lsgd_jax._src.moved import renamed_argument
from lsgd_jax._src.shared import WORKER_AXES, Axes, Shared
from lsgd_jax._src.trees import (
    HEADROOM,
    Tree,
    widened,
    zeros,
)
from lsgd_jax._src.wire.codec import draws
from lsgd_jax._src.wire.collectives import MeshChannel, Permutation, any_bound
from lsgd_jax._src.wire.shares import Shares
from lsgd_jax._src.wire.starts import common_start


class Channel(Protocol):
    """Carries the messages of one group, as one of its workers sees it.

    Attributes:
      size: the number of workers in the group.
      index: this worker's index in the group, int32; varying.
      is_all: whether the group is all workers.
      transposes: whether it has `transpose`, `scatter` and `add`, which only compiled
        programs have.
    """

    size: int
    index: Array
    is_all: bool
    transposes: bool

    def gather(self, tree: Tree) -> Tree:
        """All workers' trees, leaves [size, ...]; a failed worker's are nan, integers 0."""
        ...

    def broadcast(self, tree: Tree, source: Array) -> Tree:
        """The tree of worker `source`."""
        ...

    def sum(self, tree: Tree, where: Array, *, mean: bool) -> tuple[Tree, Array]:
        """The sum or mean over the workers for which `where` holds, and their number."""
        ...

    def permute(self, tree: Tree, permutation: Permutation) -> Tree:
        """The tree of this worker's source, or zeros without a source."""
        ...


class Group:
    """The workers along some mesh axes, as one of them sees them.

    Args:
      axes: one or several names that `Workers.map` or `jax.shard_map` binds.
      channel: carries the messages. Defaults to collectives over the axes.

    Attributes:
      bytes_sent: bytes that this worker has sent so far; a `switch` counts as the mean of
        its branches.
      kept: the memory of an agreement; see `EncodedGroup`.
      exchange_number: int32 scalar, the number of this exchange of the pull, 1, 2, …; None
        outside of an agreement.
      round: the round of the rule's graph if the phase of the step names it, otherwise
        None; see `round_of`.
      is_delayed: whether the messages travel beside a step's gradient.
      is_sound: bool scalar, equal in the group; False if the exchange must change nothing.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> mean = workers.map(lambda x: lj.rules.Group("local").mean(x))
    >>> mean(workers.put(jnp.array([1.0, 4.0]))).tolist()
    [2.5, 2.5]
    """

    def __init__(self, axes: Axes, channel: Any = None):
        self.axes: tuple[str, ...] = (axes,) if isinstance(axes, str) else tuple(axes)
        self.channel = MeshChannel(self.axes) if channel is None else channel
        self.bytes_sent = 0.0
        self.kept: Any = ()
        self.exchange_number: Any = None
        self.round: int | None = None
        self.is_delayed = False
        self.is_sound: Any = jnp.asarray(True)

    # Members

    @property
    def is_bound(self) -> bool:
        """Whether the axes are bound here, so that the group has a size."""
        # If other worker axes are bound, asking for the size of this group raises.
        return not self.axes or any_bound((*self.axes, *WORKER_AXES))

    @property
    def size(self) -> int:
        """The number of workers in the group."""
        return self.channel.size

    @property
    def index(self) -> Array:
        """This worker's index in the group, row-major over the axes: int32, varying."""
        return self.channel.index

    @property
    def reference(self) -> Tree | None:
        """The tree from which `masked_mean` sends differences, or None if it sends all."""
        return None

    def shared(self, tree: Tree) -> Shared:
        """Marks a tree as equal in the group."""
        is_all = self.channel.is_all
        return Shared(tree) if is_all else Shared(tree, dict.fromkeys(self.axes))

    def start(self, params: Tree) -> Shared[Tree]:
        """Returns the common start of the workers, in float32 or wider.

        It is the parameters themselves if all workers start from the same ones, and
        otherwise the mean of the finite starts. Only then do the parameters travel.
        """
        return self.shared(common_start(self, params))

    # Messages

    @with_automatic_axes
    def gather(self, tree: Tree) -> Tree:
        """Returns all workers' trees, leaves stacked in the order of `index`: [size, ...].

        The rows of an asynchronous worker that has failed are nan, or 0 for integers.
        """
        self._count(tree)
        return self.channel.gather(tree)

    def transpose(self, tree: Tree) -> Tree:
        """Sends row i of each leaf to worker i; row j of the result is from worker j.

        Args:
          tree: leaves [size, ...]; varying. Only in compiled programs, not between
            asynchronous workers.
        """
        self._count(tree)
        return self.channel.transpose(tree)

    def scatter(self, tree: Tree) -> Tree:
        """Returns this worker's row of the sum of all trees: [size, ...] to [...]."""
        self._count(tree)
        return self.channel.scatter(tree)

    def add(self, tree: Tree, times: int = 1) -> Tree:
        """Returns the sum of all trees; in a loop it counts as so many messages."""
        self._count([tree] * times)
        return self.channel.add(tree)

    @with_automatic_axes
    def elect(self, score: Array) -> tuple[Array, Array]:
        """Elects the worker with the lowest score; ties go to the lowest index.

        Args:
          score: float scalar, varying. A worker with a score that is not finite is never
            elected.

        Returns:
          (leader, found): the index of the leader in the group (int32), and whether any
          worker had a finite score (bool). Both are the same for the whole group.
        """
        return lowest(self.gather(score))

    def broadcast(self, tree: Tree, source: Array) -> Tree:
        """Sends the tree of worker `source` (an index in the group) to the whole group.

        It is a sum to which the others add zeros: -0.0 arrives as 0.0.
        """
        self._count(tree)
        return self.channel.broadcast(tree, jnp.asarray(source))

    def masked_sum(self, tree: Tree, where: Array | bool = True) -> tuple[Tree, Array]:
        """Sum over the workers for which `where` (bool, varying) holds.

        Args:
          tree: the summands; varying. A worker that is masked out may hold nan or inf.
          where: whether this worker takes part.

        Returns:
          (sums, count): a tree in float32 or wider, and the number of workers that took
          part (float32 scalar). Both are the same for the whole group, and travel together.
        """
        self._count((widened(tree), jnp.float32(0)))  # the number of workers, too
        return self.channel.sum(tree, jnp.asarray(where), mean=False)

    def masked_mean(
        self, tree: Tree, where: Array | bool = True, reference: Tree | None = None
    ) -> tuple[Tree, Array]:
        """Mean over the workers for which `where` holds; nan if no worker takes part.

        Args:
          tree, where: as for `masked_sum`.
          reference: a tree that is equal in the group and close to `tree`, in float32 or
            wider. A narrow wire format sends differences to it. Defaults to the last mean.
        """
        del reference
        self._count((widened(tree), jnp.float32(0)))
        return self.channel.sum(tree, jnp.asarray(where), mean=True)

    @with_automatic_axes
    def mean(self, tree: Tree) -> Tree:
        """Mean over all workers' trees, computed in float32 or wider."""
        means, _ = self.masked_mean(tree)
        return jax.tree.map(lambda m, x: m.astype(x.dtype), means, tree)

    @renamed_argument(turn="number")
    @with_automatic_axes
    def permute(self, tree: Tree, permutation: Permutation, number: int = 0) -> Tree:
        """Sends each worker's tree along a permutation of the group.

        Args:
          tree: the tree to send; varying.
          permutation: pairs (source, destination) of indices in the group. Every source and
            every destination may occur at most once.
          number: the number of the message in this exchange, so that each message has its
            own draws for stochastic rounding.

        Returns:
          The tree of this worker's source, or zeros for a worker that is no destination.
          With a narrow wire format, in float32 or wider.

        Raises:
          ValueError: two pairs share a source or a destination, or an index is outside.
        """
        del number
        return self._permuted(tree, permutation)

    @renamed_argument(turn="number")
    def quantization_error(self, tree: Tree, number: int = 0) -> Tree | None:
        """The quantization error of permuting or pushing `tree`, None if sent exactly.

        `number` is that of the message, see `permute`. A rule that subtracts its messages
        from the sender returns this error to the sender.
        """
        del tree, number
        return None

    @with_automatic_axes
    def push(
        self,
        tree: Tree,
        weight: Array,
        rounds: Sequence[Sequence[Permutation]],
        r: Any,
    ) -> tuple[Tree, Array]:
        """Sends each worker's tree and weight to its out-neighbors in one round of a graph.

        A compiled program holds one round if it is known, or few rounds as branches. Of
        many rounds, such as random matchings, it holds none: the permutation depends on r,
        see `MeshChannel.permute`.

        Args:
          tree: the tree to send, finite; varying.
          weight: float scalar, or [n] with one weight per permutation of the round;
            varying.
          rounds: for each round its permutations, as for `permute`.
          r: the round, see `round_of`; the same for the whole group.

        Returns:
          (sums, mass): over this worker's in-neighbors j, Σ weight_j · tree_j (in float32
          or wider) and Σ weight_j, a scalar; zeros without in-neighbors.
        """

        def weighed(tree: Tree, m: Array) -> Tree:
            return jax.tree.map(lambda x: m.astype(widened(x).dtype) * widened(x), tree)

        def send(permutations: Sequence[Permutation], message: Any) -> tuple[Tree, Array]:
            tree, weight = message
            total = (zeros(tree), jnp.zeros([], weight.dtype))  # (sums, mass)
            for n, permutation in enumerate(permutations):
                own = weight[n] if weight.ndim else weight
                arrived, m = self.permute((tree, own), permutation)
                total = jax.tree.map(jnp.add, total, (weighed(arrived, m), m))
            return total

        if len(set(rounds)) > most_branches(self.size) and not isinstance(r, int):
            # As an array, the permutation is an argument of the program and not a part of
            # it.
            sources = jnp.asarray(sources_of(rounds, self.size))[r]
            return send(list(sources), (tree, weight))
        branches = [functools.partial(send, permutations) for permutations in rounds]
        return self.switch(r, branches, (tree, weight))

    def coordinatewise(self, rule: Callable[..., Array], tree: Tree, *scalars: Any) -> Tree:
        """Applies a rule [W, ...] -> [...] to the group's W values at every coordinate.

        Each worker applies it to 1/W of the coordinates, see `Shares`. The rule is called
        with values in float32 or wider, and with the scalars. Traced values must be passed
        as scalars, not in a closure. The result has the dtypes of the tree.
        """
        check_all_auto()

        def of_shards(tree: Tree, *scalars: Any) -> Tree:
            shares = Shares(self, tree)
            rows = shares.rows(tree)
            return shares.join([rule(widened(x), *scalars).astype(x.dtype) for x in rows])

        scalars = jax.tree.map(jnp.asarray, scalars)
        return shard_by_shard(of_shards, tree, *scalars)

    def round_of(self, count: int) -> Any:
        """The round of this exchange on a graph of so many: an int or an int32 scalar."""
        if self.round is not None:
            return self.round
        return (self.exchange_number - 1) % count

    def switch(self, r: Any, branches: Sequence[Callable], operand: Any) -> Any:
        """`lax.switch` for branches that communicate; r is the same for the whole group."""
        if isinstance(r, int):
            return branches[r](operand)
        if len(branches) == 1:
            return branches[0](operand)
        before = self.bytes_sent
        sent: dict[int, float] = {}

        def counted(i: int, operand: Any) -> Any:
            self.bytes_sent = 0.0
            result = branches[i](operand)
            sent[i] = self.bytes_sent
            return result

        # Bytes are counted while a branch is traced, which `lax.switch` does.
        each = [functools.partial(counted, i) for i in range(len(branches))]
        result = lax.switch(r, each, operand)
        self.bytes_sent = before + sum(sent.values()) / max(len(sent), 1)
        return result

    def bernoulli(self, probability: Array | float, seed: int, t: Array) -> Array:
        """Draws True with `probability` for this worker at step t: bool scalar, varying."""
        return jax.random.bernoulli(draws(seed, t, self.index), probability)

    def movable(self, sums: Tree, instead: Tree) -> Tree:
        """Sums by which a center may move.

        Sums of finite numbers may overflow, and the exchange is dropped then. Beside a
        gradient, which would wait for a test of all elements, those that overflow are
        replaced by elements of `instead`.
        """
        if not self.is_delayed:
            return sums

        def finite(s: Array, other: Array) -> Array:
            return jnp.where(jnp.isfinite(HEADROOM * s), s, other)

        return jax.tree.map(finite, sums, instead)

    # Counted messages

    def _permuted(self, tree: Tree, permutation: Permutation) -> Tree:
        is_detour = isinstance(permutation, Array) and self.channel.transposes
        travels = 2 if is_detour else 1  # see `MeshChannel.permute`
        self._count([tree] * travels)
        return self.channel.permute(tree, permutation)

    def _count(self, tree: Tree) -> None:
        if self.channel.size > 1:
            self.bytes_sent += shard_nbytes(tree)


def most_branches(size: int) -> int:
    """The most rounds of a graph that a program holds as branches, a little over log2 W."""
    return math.ceil(math.log2(size)) + 1


def phase_rounds(rounds: Sequence[Hashable], size: int) -> tuple[int, ...]:
    """The rounds that a phase may name: for each round the first one that equals it.

    () if programs hold the only round, or none of too many: a phase names nothing then.

    >>> phase_rounds(["a", "b", "a"], 8)
    (0, 1, 0)
    >>> phase_rounds("abcdefghi", 8), phase_rounds("aa", 8)
    ((), ())
    """
    first: dict[Hashable, int] = {}
    named = tuple(first.setdefault(each, r) for r, each in enumerate(rounds))
    return named if 1 < len(first) <= most_branches(size) else ()


def sources_of(rounds: Sequence[Sequence[Permutation]], size: int) -> np.ndarray:
    """For each round and each of its permutations the workers' sources, -1 for none.

    >>> sources_of([[[(0, 1), (1, 0)]], [[(0, 2)]]], 3).tolist()
    [[[1, 0, -1]], [[-1, -1, 0]]]
    """
    sources = np.full((len(rounds), max(map(len, rounds)), size), -1, np.int32)
    for r, permutations in enumerate(rounds):
        for n, permutation in enumerate(permutations):
            for source, destination in permutation:
                sources[r, n, destination] = source
    return sources


def lowest(scores: Array) -> tuple[Array, Array]:
    """The index of the lowest finite score, int32, and whether there is one.

    >>> lowest(jnp.array([jnp.nan, 2.0, 2.0]))
    (Array(1, dtype=int32), Array(True, dtype=bool))
    """
    # argmin would return the index of a nan.
    finite = jnp.isfinite(scores)
    first = jnp.argmin(jnp.where(finite, scores, jnp.inf))
    return first.astype(jnp.int32), finite.any()
