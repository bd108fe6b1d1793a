"""aggregate: replace each worker's gradient by an aggregate of all workers' gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.checks import check_axes, check_step_count
from lsgd_jax._src.complex_leaves import in_pairs, joined
from lsgd_jax._src.exchange.branch import cond, unbatched
from lsgd_jax._src.exchange.noted import note
from lsgd_jax._src.exchange.placement import misplaced, sample_after, unknown
from lsgd_jax._src.exchange.rule import fits_in_sums
from lsgd_jax._src.exchange.traffic import Traffic
from lsgd_jax._src.explicit import with_automatic_axes
from lsgd_jax._src.shared import Axes, Shared
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group


class AggregateState(NamedTuple):
    """The state of `aggregate`.

    Attributes:
      count: int32 scalar, steps taken; shared.
      restored: int32 scalar, how often this worker's gradient was left out, because it was
        not finite or too large to be added up; per worker.
      misplaced: int32 scalar, how often the aggregate itself was added to x, which means
        that it stood last in the chain; per worker.
      expected: float32 [k], the values of some elements of x in that case; per worker.
      own: the rule's state; per worker.
      traffic: the traffic counters; shared.
    """

    count: Shared[Array]
    restored: Array
    misplaced: Array
    expected: Array
    own: Any
    traffic: Traffic


def aggregate(
    rule: Callable[[Group, Tree, Any, Array], tuple[Tree, Any]],
    axes: Axes = ("node", "local"),
    init_own: Callable[[Tree], Any] = lambda params: (),
    until: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces each worker's gradient by an aggregate of all workers' gradients.

    .. math:: g_i \leftarrow \text{rule}(g_1, \ldots, g_W) \quad \text{on the first until}
      \text{ steps}

    It stands **first** in a chain, before clipping and the base optimizer.

    Args:
      rule: (group, g, own, finite) -> (aggregate, own), for one worker. It is the only
        function that communicates, through `group`. g: the worker's gradients; own: the
        rule's state; finite: bool scalar, whether all of g is finite and leaves headroom
        for a sum over the group; aggregate: a tree
        like g, which is cast to its dtypes.
      axes: the mesh axes of the group.
      init_own: params -> own.
      until: the last step that communicates. Defaults to all steps.

    Returns:
      A gradient transformation for one worker. Its state is an `AggregateState`.

    Raises:
      ValueError: axes that are no names; in `update`, a state stacked over workers.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> first = lambda group, g, own, finite: (group.broadcast(g, 0), own)
    >>> tx = lj.aggregate(first, axes="local")
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> follow = workers.map(lambda g: tx.update(g, tx.init(g))[0])
    >>> follow(workers.put(jnp.array([1.0, 2.0]))).tolist()
    [1.0, 1.0]
    """

    check_axes(axes)

    def init(params: Tree) -> Any:
        params = in_pairs(trees.arrays(params))
        return AggregateState(
            count=Shared(jnp.zeros([], jnp.int32)),
            restored=jnp.zeros([], jnp.int32),
            misplaced=jnp.zeros([], jnp.int32),
            expected=unknown(params),
            own=init_own(params),
            traffic=Traffic.zero(axes, 1, 0),
        )

    def update(updates, state, params=None, **extra_args) -> Any:
        del extra_args
        count = state.count.value
        check_step_count(count)
        note([axes], updates)
        updates = in_pairs(trees.arrays(updates))
        params = None if params is None else in_pairs(trees.arrays(params))

        def communicate(g, own, traffic):
            group = Group(axes)
            finite = trees.all_finite(g) & fits_in_sums(group, g, ())
            total, own = rule(group, g, own, finite)
            total = optax.tree.cast_like(total, g)
            return total, own, traffic.sent(group.bytes_sent), ~finite

        def keep(g, own, traffic):
            return g, own, traffic, jnp.asarray(False)

        # All workers have this count, so they leave the warm-up together.
        due = True if until is None else unbatched(count) < until
        g, own, traffic, excluded = cond(
            due, communicate, keep, updates, state.own, state.traffic
        )
        last = jnp.int32(0)
        expected = state.expected
        if params is not None:
            known = jnp.isfinite(expected).all()
            last = jnp.where(known, 1 - misplaced(expected, params), 0)
            after = sample_after(params, g)
            # An aggregate that moves nothing gives no information.
            expected = jnp.where(misplaced(after, params) == 1, after, jnp.inf)
        return joined(g), AggregateState(
            count=Shared(jnp.asarray(optax.safe_increment(count))),
            restored=state.restored + excluded.astype(jnp.int32),
            misplaced=state.misplaced + last,
            expected=expected,
            own=own,
            traffic=traffic,
        )

    return optax.GradientTransformationExtraArgs(
        with_automatic_axes(init), with_automatic_axes(update)
    )
