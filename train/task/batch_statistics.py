"""Batch statistics: what a model keeps beside its parameters, and what becomes of it.

Three policies: every worker keeps its own ('keep'); they are averaged whenever the method
communicates ('average'); or they are worked out anew from training data for the model that
is tested ('reestimate'), the workers' own being left alone.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import lsgd_jax as lj


Policy = Literal["keep", "average", "reestimate"]
Apply = Callable[[Any], tuple[Any, Any]]


def averaging(
    policy: Policy, stats: Any, opt_state: Any
) -> optax.GradientTransformationExtraArgs | None:
    """What averages the statistics at each communication, or None if nothing does.

    Args:
      policy: see above.
      stats: the statistics of one model.
      opt_state: the state of a method; says how often it communicates.
    """
    periods = [level.period for level in lj.diagnostics(opt_state)]
    if policy != "average" or not periods or not jax.tree.leaves(stats):
        return None
    return lj.local_sgd(min(periods))


def averaged(
    tx: optax.GradientTransformationExtraArgs | None, stats: Any, state: Any
) -> tuple[Any, Any]:
    """One worker's statistics, averaged if it is time, and the state of `averaging`."""
    if tx is None:
        return stats, state
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, stats), state, stats)
    return lj.apply_updates(stats, updates), state


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
