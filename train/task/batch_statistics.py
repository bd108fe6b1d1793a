"""Batch statistics: the running means that a model keeps beside its parameters.

Three policies: each worker keeps its own ('keep'); they are averaged over all workers
whenever the method communicates ('average'); or they are computed anew from training data
for the model that is tested ('reestimate'), and the workers keep their own.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

import lsgd_jax as lj


Policy = Literal["keep", "average", "reestimate"]
Apply = Callable[[Any], tuple[Any, Any]]


def averaged(stats: Any, before: Any, after: Any) -> Any:
    """One worker's statistics; the mean of all workers' if the step has communicated.

    Args:
      stats: the statistics after a step.
      before: the state of the optimizer before it.
      after: the same after it.
    """
    if not jax.tree.leaves(stats):
        return stats

    def exchanges(opt_state: Any) -> Array:  # by all levels of the method together
        counts = [pull.traffic.exchanges.value for pull in lj.diagnostics(opt_state)]
        return sum(counts, start=jnp.int32(0))

    def mean(stats: Any) -> Any:
        tx = lj.local_sgd(period=1)
        no_step = jax.tree.map(jnp.zeros_like, stats)
        updates, _ = tx.update(no_step, tx.init(stats), stats)
        return lj.apply_updates(stats, updates)

    has_communicated = exchanges(after) > exchanges(before)
    return jax.lax.cond(has_communicated, mean, lambda stats: stats, stats)


def of_batch(apply: Apply, stats: Any) -> Any:
    """The statistics of one batch, without any memory of earlier ones.

    A running statistic is renewed as r ← m r + (1 - m) b with b that of the batch. From
    what becomes of r = 0 and of r = 1 follow m and b, whatever the layer's momentum is.

    Args:
      apply: statistics -> (anything, renewed statistics), on one batch.
      stats: statistics of the right shapes.

    >>> apply = lambda r: (None, 0.9 * r + 0.1 * 5.0)
    >>> float(of_batch(apply, jnp.zeros([])))
    5.0
    """
    from_zero = apply(jax.tree.map(jnp.zeros_like, stats))[1]
    from_one = apply(jax.tree.map(jnp.ones_like, stats))[1]
    return jax.tree.map(lambda zero, one: zero / (1 - (one - zero)), from_zero, from_one)
