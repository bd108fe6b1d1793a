"""Robust means of the workers of a group: Krum, the geometric and the trimmed mean.

Each is a function of the rows of all workers, of which every worker sees its share of the
coordinates (`Shares`). The functions serve as aggregates of gradients (`robust.py`) and as
the target of a pull (`robust_mean`).
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_option, check_positive_int
from lsgd_jax._src.exchange.rule import Rule, always
from lsgd_jax._src.layouts import known_axes, shard_by_shard
from lsgd_jax._src.norms import norm, squares
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.trees import Tree, column, own_axes, widened
from lsgd_jax._src.wire.group import Group
from lsgd_jax._src.wire.shares import Shares


Rows = Sequence[Array]  # buffers [W, ...]; zeros in the rows that do not count
# (one partial sum per buffer, how often it is called) -> their sum over all workers
Total = Callable[[Sequence[Array], int], Array]
Mean = Callable[[Rows, Array, Total], Sequence[Array]]  # (rows, counts [W], total) -> mean

RobustMean = Literal["krum", "geometric_median", "trimmed_mean"]


def agreed(
    group: Group, tree: Tree, takes_part: Array, mean: Mean, rounded: bool = False
) -> tuple[Tree, Array]:
    """The mean of the trees of the workers that are finite, and whether there are any.

    Args:
      group: the workers.
      tree: of this worker; varying.
      takes_part: bool scalar, whether this worker counts; varying.
      mean: what is computed of all rows.
      rounded: whether the mean travels, and is returned, in the dtypes of the tree.

    Returns:
      (mean, found): a tree in float32 at least unless it is rounded, nan if no worker is
      finite; a bool scalar.
    """
    if not jax.tree.leaves(tree):
        return tree, jnp.asarray(True)  # a part without floats
    axes = known_axes()
    sizes = jax.sharding.get_abstract_mesh().shape
    devices = math.prod(sizes[name] for name in axes)
    elements = [max(leaf.size, 1) for leaf in jax.tree.leaves(tree)]

    def of_shards(tree: Tree, takes_part: Array) -> tuple[Tree, Array]:
        counts = group.gather(takes_part.astype(jnp.float32)) == 1
        shards = jax.tree.leaves(tree)
        # A leaf that is not sharded lies on all devices of a worker, and counts once.
        copies = [max(devices * x.size // n, 1) for x, n in zip(shards, elements)]
        shares = Shares(group, tree, copies)
        weights = [1 / copies[leaves[0]] for leaves in shares.packing.members]

        def total(partial: Sequence[Array], times: int) -> Array:
            here = sum(weight * x for weight, x in zip(weights, partial))
            here = lax.psum(here, axes) if axes else jnp.asarray(here)
            return shares.total(here, times)

        given = shares.rows(tree)
        rows = [jnp.where(column(counts, x), widened(x), 0) for x in given]
        means = list(mean(rows, counts, total))
        if rounded:
            means = [m.astype(x.dtype) for m, x in zip(means, given)]
        return shares.join(means), counts.any()

    return shard_by_shard(of_shards, tree, takes_part, out=lambda specs, _: (specs, Spec()))


def krum(faulty: int = 1, keep: int = 1) -> Mean:
    """The mean of the `keep` rows whose W - f - 2 nearest other rows are nearest.

    Raises:
      ValueError: f below 0, less than one row to keep.
    """
    _check_count("faulty", faulty)
    check_positive_int("keep", keep)

    def best(rows: Rows, counts: Array, gaps: Array) -> list[Array]:
        workers = jnp.arange(len(counts))
        is_other = counts[None] & (workers[None] != workers[:, None])
        nearest = jnp.sort(jnp.where(is_other, gaps, jnp.inf), axis=1)
        are_summed = workers[None] < counts.sum() - faulty - 2
        # The root of the score has the same order, and no square overflows.
        scores = norm(squares(jnp.where(are_summed, nearest, 0), axis=1))
        rank = jnp.argsort(jnp.argsort(jnp.where(counts, scores, jnp.inf)))
        return _mean(rows, counts & (rank < keep))

    def mean(rows: Rows, counts: Array, total: Total) -> list[Array]:
        # All workers meet in this sum, so it stands in no branch.
        gaps = norm(total([_gaps(x) for x in rows], 1))  # [W, W]
        return lax.cond(
            counts.sum() >= 2 * faulty + 3,
            lambda: best(rows, counts, gaps),
            lambda: _median(rows, counts),
        )

    return mean


def geometric_median(iterations: int = 32) -> Mean:
    """The point with the smallest sum of distances to the rows, by Weiszfeld's iteration.

    Raises:
      ValueError: less than one iteration.
    """
    check_positive_int("iterations", iterations)

    def nearest(rows: Rows, counts: Array, total: Total) -> list[Array]:
        def closer(_: Any, z: list[Array]) -> list[Array]:

            def apart(x, z):
                return squares(x - z[None], axis=own_axes(x))

            gaps = norm(total(list(map(apart, rows, z)), iterations))
            usual = median(jnp.where(counts, gaps, jnp.nan))
            least = jnp.finfo(gaps.dtype).tiny
            nu = jnp.maximum(jnp.where(jnp.isfinite(usual), 1e-6 * usual, 0), least)
            return _mean(rows, jnp.where(counts, nu / jnp.maximum(gaps, nu), 0))

        # Weiszfeld's steps are short far from the median, and from the mean it is as far
        # as the attackers wish.
        return lax.fori_loop(0, iterations, closer, _median(rows, counts))

    return nearest


def trimmed_mean(cut: int = 1) -> Mean:
    """For each coordinate the mean without the `cut` smallest and largest values.

    Raises:
      ValueError: a cut below 0.
    """
    _check_count("cut", cut)

    def inner(rows: Rows, counts: Array, total: Total) -> list[Array]:
        del total
        rank = jnp.arange(len(counts))
        number = counts.sum()
        in_the_middle = (rank == (number - 1) // 2) | (rank == number // 2)
        stays = jnp.where(
            number > 2 * cut, (rank >= cut) & (rank < number - cut), in_the_middle
        )
        stays &= rank < number
        ordered = [_ordered(x, column(counts, x)) for x in rows]
        return _mean([jnp.where(column(stays, x), x, 0) for x in ordered], stays)

    return inner


KINDS: dict[str, Callable[..., Mean]] = {
    "krum": krum,
    "geometric_median": geometric_median,
    "trimmed_mean": trimmed_mean,
}


@by_value
def robust_mean(kind: RobustMean, axes: Axes = ("node", "local"), **options: int) -> Rule:
    r"""A mean that a few workers cannot move, as a rule of a pull.

    Over the n workers of the group whose y and loss are finite:

    - 'krum': the mean of the `keep` (1) workers of the lowest score. A worker's score is
      the sum of the n - f - 2 smallest :math:`|y_i - y_j|^2`, with f the `faulty` (1)
      workers. Needs n ≥ 2 f + 3.
    - 'geometric_median': the z of the smallest :math:`\sum_i |y_i - z|`, by `iterations`
      (32) steps of Weiszfeld's iteration from the coordinate-wise median.
    - 'trimmed_mean': for each coordinate the mean without the `cut` (1) smallest and
      largest values. Needs n > 2 cut.

    With fewer workers than a kind needs the target is their coordinate-wise median. Each
    worker computes 1/W of the coordinates, for all workers. They travel in float32 only.

    Args:
      kind: which mean.
      axes: the mesh axes of the group.
      **options: those of the kind, see `krum`, `geometric_median` and `trimmed_mean`, which
        are the same means of gradients.

    Raises:
      ValueError: an unknown kind, or an option that the kind does not have.

    >>> import lsgd_jax as lj
    >>> pull = lj.Pull(lj.rules.robust_mean("krum", faulty=2, keep=3), 1.0, every=16)
    """
    check_option("kind", kind, get_args(RobustMean))
    known = inspect.signature(KINDS[kind]).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(
            f"{kind!r} takes {', '.join(f'`{name}`' for name in known)}, got "
            f"{unknown[0]}={options[unknown[0]]!r}"
        )
    mean = KINDS[kind](**options)

    def agree(group, x, y, state, takes_part, t):
        z, found = agreed(group, y, takes_part, mean)
        return z, found, state

    return Rule(
        axes,
        lambda params: (),
        agree,
        reads_x=False,
        is_common=True,
        summable=always,
    )


def _mean(rows: Rows, weights: Array) -> list[Array]:
    """The weighted mean of the rows; weights: [W], bools or floats."""
    means = list[Array]()
    for x in rows:
        each = weights.astype(x.dtype)
        means.append((column(each / each.sum(), x) * x).sum(axis=0))
    return means


def _gaps(x: Array) -> Array:
    """The sums of squares between all rows, [3, W, W], from differences: exact for near
    rows."""

    def to(i):
        return squares(x - x[i][None], axis=own_axes(x))

    return jnp.moveaxis(lax.map(to, jnp.arange(len(x))), 0, 1)


def _median(rows: Rows, counts: Array) -> list[Array]:
    """The coordinate-wise median of the rows that count."""
    return [median(jnp.where(column(counts, x), x, jnp.nan)) for x in rows]


def median(rows: Array) -> Array:
    """The median over the first axis of what is finite; nan where nothing is.

    >>> median(jnp.array([[1.0], [4.0], [jnp.nan], [2.0]])).tolist()
    [2.0]
    """
    ordered = _ordered(rows, jnp.isfinite(rows))
    number = jnp.isfinite(ordered).sum(axis=0, dtype=jnp.int32)[None]
    rank = lax.broadcasted_iota(jnp.int32, rows.shape, 0)

    # A sum over ranks, because indexing by rank would take further copies.
    def at(k):
        return jnp.where(rank == k, ordered, 0).sum(axis=0)

    middle = 0.5 * at((number - 1) // 2) + 0.5 * at(number // 2)
    return jnp.where(number[0] > 0, middle, jnp.nan)


def _ordered(rows: Array, where: Array) -> Array:
    """For each coordinate the values where `where` holds from the smallest on, then inf.

    Equal values need no order, in which XLA would keep them by sorting indices, too.
    """
    return lax.sort(jnp.where(where, rows, jnp.inf), dimension=0, is_stable=False)


def _check_count(name: str, value: Any) -> None:
    """Raises ValueError unless the value is an int of at least 0."""
    if not (isinstance(value, int) and value == 0):
        check_positive_int(name, value)
