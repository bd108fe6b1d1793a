"""Scores of workers, by which they are elected: their own losses, or those of a peer."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group


JudgedBy = Literal["own", "peers"]


def recorded(losses: Array, loss: Any, t: Array) -> tuple[Array, Array]:
    """Puts the loss of step t into a ring of the last ones: (losses, their mean).

    Raises:
      ValueError: no loss, or one that is no scalar.

    >>> losses, mean = recorded(jnp.array([1.0, 2.0]), 4.0, jnp.int32(3))
    >>> losses.tolist(), mean.tolist()
    ([4.0, 2.0], 3.0)
    """
    if loss is None or jnp.shape(loss) != ():
        raise ValueError(
            "the leader is elected by each worker's loss, a scalar: pass `loss=loss` to "
            f"`update` of a chain or to `step` of an `outer`, got {loss}"
        )
    window, dtype = len(losses), losses.dtype
    # Under a user's `jax.vmap`, a scatter over rows of several workers would communicate.
    is_here = jnp.arange(window, dtype=t.dtype) == (t - 1) % window
    losses = jnp.where(is_here, jnp.asarray(loss, dtype), losses)
    return losses, losses.sum() / jnp.minimum(t, window).astype(dtype)


def judged(
    group: Group,
    state: Any,
    y: Tree,
    takes_part: Array,
    value_fn: Callable[[Tree], Array] | None,
) -> tuple[Array, Any]:
    """All workers' scores, inf for those that are not finite, and the state with its own.

    Args:
      group: the workers.
      state: has a field `score`; per worker.
      y: the parameters; per worker.
      takes_part: bool scalar, whether this worker takes part.
      value_fn: y -> loss on this worker's batch, if peers judge. Otherwise the scores are
        those of the states.

    Returns:
      (scores, state): float [W], the same for all, and the state.
    """
    if value_fn is None:
        return group.gather(jnp.where(takes_part, state.score, jnp.inf)), state
    ring = [(i, (i + 1) % group.size) for i in range(group.size)]
    arrived = group.permute(y, ring, turn=1)  # the target is sent as turn 0
    predecessor = jax.tree.map(lambda z, y: z.astype(y.dtype), arrived, y)
    measured = value_fn(predecessor).astype(state.score.dtype)
    # A bad batch of the judge would otherwise leave a group of two without a target.
    judges = takes_part | jnp.isfinite(measured)
    measured = jnp.where(judges, measured, jnp.finfo(measured.dtype).max)
    told = group.gather(jnp.stack([measured, takes_part.astype(measured.dtype)]))
    scores = jnp.where(told[:, 1] == 1, jnp.roll(told[:, 0], -1), jnp.inf)
    return scores, state._replace(score=scores[group.index])
