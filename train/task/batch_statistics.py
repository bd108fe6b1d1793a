"""Batch statistics: running means that a model keeps in addition to its parameters.

Three policies: each worker keeps its own statistics ('keep'); they are averaged over all
workers whenever the method communicates ('average'); or workers keep their own, and a test
computes those of the tested model from training data ('reestimate').

Training steps do not read the statistics, r ← m r + (1 - m) b is linear, and all workers
have the same m. So workers that take equally many steps have the same mean of r at a test,
however often r was averaged before. Asynchronous workers therefore keep theirs, and
'average' takes the mean where all their states are at hand: before a test or a checkpoint.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import lsgd_jax as lj


Apply = Callable[[Any], tuple[Any, Any]]


def averaged(stats: Any, before: Any, after: Any) -> Any:
    """Returns the mean over all workers if the step communicated, otherwise `stats`.

    Args:
      stats: one worker's statistics after a step.
      before: the state of its optimizer before the step.
      after: the state of its optimizer after the step.
    """
    if not jax.tree.leaves(stats):
        return stats

    def exchanges(opt_state: Any) -> list[Array]:  # of each level of the method
        return [pull.traffic.exchanges.value for pull in lj.diagnostics(opt_state)]

    def mean(stats: Any) -> Any:
        tx = lj.local_sgd(period=1)
        no_step = jax.tree.map(jnp.zeros_like, stats)
        updates, _ = tx.update(no_step, tx.init(stats), stats)
        return lj.apply_updates(stats, updates)

    counts = list(zip(exchanges(before), exchanges(after), strict=True))
    if all(old is new for old, new in counts):
        return stats  # the step has no exchange
    has_communicated = sum(new - old for old, new in counts) > 0
    return jax.lax.cond(has_communicated, mean, lambda stats: stats, stats)


def of_batch(apply: Apply, stats: Any) -> Any:
    """The statistics of one batch, without memory of earlier batches.

    A layer updates a running statistic as r ← m r + (1 - m) b, where b is the statistic of
    the batch. The results for r = 0 and r = 1 determine m and b for any momentum m.

    Args:
      apply: maps statistics to (anything, updated statistics) on one batch.
      stats: statistics of the right shapes.

    >>> apply = lambda r: (None, 0.9 * r + 0.1 * 5.0)
    >>> float(of_batch(apply, jnp.zeros([])))
    5.0
    """
    from_zero = apply(jax.tree.map(jnp.zeros_like, stats))[1]
    from_one = apply(jax.tree.map(jnp.ones_like, stats))[1]
    return jax.tree.map(lambda zero, one: zero / (1 - (one - zero)), from_zero, from_one)
