"""Group averaging: the mean of changing groups every step, of all workers now and then."""

import functools
from typing import Unpack

import jax
import jax.numpy as jnp

from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_positive_int
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Rule
from lsgd_jax._src.exchange.schedule import Period, check_every
from lsgd_jax._src.methods.averaging import average
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.trees import Tree, mean_of, widened
from lsgd_jax._src.wire.group import Group, phase_rounds


@by_value
def butterfly(group_size: int, axes: Axes = ("node", "local")) -> Rule:
    r"""The mean of a group of S workers that changes every time, as a rule of a pull.

    At exchange n worker i is in one group with the workers whose index differs from i only
    in the bits from r log2 S to (r + 1) log2 S, r = (n - 1) mod ceil(log2 W / log2 S).
    Workers that are not finite are left out. The sum takes log2 S exchanges with one
    partner each. With W = S^k, k steps give the exact mean. With a narrow wire format a
    worker keeps the quantization error of its messages, so that the sum over all workers
    is conserved.

    Args:
      group_size: S, a power of two; the groups of the last round may be smaller.
      axes: the mesh axes of all W workers.

    Raises:
      ValueError: a size that is not a power of two; in `init`, a W that is not one.

    >>> import lsgd_jax as lj
    >>> lj.rules.butterfly(2).axes
    ('node', 'local')
    """
    check_group_size(group_size)

    def init(params: Tree) -> tuple:
        group = Group(axes)
        if group.is_bound:
            hops_of(group_size, group.size)  # raises early if W is not a power of two
        return ()

    def agree(group, x, y, state, takes_part, t):
        def sum_over(hops, tree):
            for hop in hops:
                swap = [(i, i ^ hop) for i in range(group.size)]
                arrived = group.permute(tree, swap, hop)
                error = group.quantization_error(tree, hop)
                tree = jax.tree.map(jnp.add, tree, arrived)
                if error is not None:  # the partner did not receive it
                    tree = jax.tree.map(jnp.add, tree, error)
            return tree

        mine = jax.tree.map(lambda y: jnp.where(takes_part, widened(y), 0), y)
        branches = [
            functools.partial(sum_over, hops) for hops in hops_of(group_size, group.size)
        ]
        r = group.round_of(len(branches))
        sums, count = group.switch(r, branches, (mine, takes_part.astype(jnp.float32)))
        return mean_of(sums, count), count > 0, state

    def rounds(size: int) -> tuple[int, ...]:
        return phase_rounds(list(map(tuple, hops_of(group_size, size))), size)

    return Rule(axes, init, agree, keeps=(), reads_x=False, rounds=rounds)


def check_group_size(group_size: int) -> None:
    """Raises ValueError unless it is a power of two, at least 2."""
    check_positive_int("group_size", group_size)
    if group_size < 2 or group_size.bit_count() > 1:
        raise ValueError(
            f"`group_size` must be a power of two, at least 2, got {group_size=}"
        )


def hops_of(group_size: int, workers: int) -> list[list[int]]:
    """Partner distances for each round, given as bit masks of the worker index.

    Raises:
      ValueError: the number of workers is not a power of two.

    >>> hops_of(4, workers=8)
    [[1, 2], [4]]
    """
    if workers.bit_count() > 1:
        raise ValueError(
            "groups that change along a butterfly need a power of two workers "
            f"(1, 2, 4, 8, …), got {workers}"
        )
    hops = [2**b for b in range(workers.bit_length() - 1)]
    each = group_size.bit_length() - 1
    return [hops[k : k + each] for k in range(0, len(hops), each)] or [[]]


@by_value
@takes_options()
def wagma(
    group_size: int = 2,
    sync_period: Period = 10,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""Group averaging (WAGMA-SGD, in lock-step): a group's mean at every step.

    .. math::
      y_i \leftarrow \frac{1}{|G_i(t)|} \sum_{j \in G_i(t)} y_j, \qquad
      y_i \leftarrow \frac{1}{W} \sum_j y_j \quad \text{if } t \bmod \tau = 0,

    with y = x + u the worker's parameters after its own step t = 1, 2, …, G_i(t) its
    group of S workers at that step (see `butterfly`) and τ the `sync_period`. A worker
    whose y or loss is not finite is left out and takes its group's mean whole.

    Args:
      group_size: workers in a group, S, a power of two.
      sync_period: steps between means of all workers, τ, or `Periods`.
      axes: the mesh axes of all W workers.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: a size that is not a power of two, a period below 1; in `init`, a
        number of workers that is not a power of two.

    Reference: Li et al., Breaking (Global) Barriers in Parallel Stochastic Optimization
    with Wait-Avoiding Group Averaging, TPDS 2021, arXiv:2005.00124.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.wagma(group_size=2, sync_period=10))
    """
    check_every("sync_period", sync_period)
    # Where both are due the first changes nothing: the mean of group means is the mean.
    groups = Pull(butterfly(group_size, axes), 1.0)
    everyone = Pull(average(axes), 1.0, every=sync_period)
    return exchange(groups, everyone, **options)
