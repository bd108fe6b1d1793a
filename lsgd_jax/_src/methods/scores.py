"""Scores of workers, by which they are elected: the means of their last losses."""

from typing import Any

import jax.numpy as jnp
from jax import Array


HOW = (
    "pass `loss=loss` to `update` of a chain or to `step` of an `outer`, or name its place "
    "in the results of the step in `lj.around(step, method, loss=...)`"
)


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
            f"the leader is elected by each worker's loss, a scalar: {HOW}, got {loss}"
        )
    window = len(losses)
    dtype = losses.dtype
    # Under a user's `jax.vmap`, a scatter over rows of several workers would communicate.
    is_here = jnp.arange(window, dtype=t.dtype) == (t - 1) % window
    losses = jnp.where(is_here, jnp.asarray(loss, dtype), losses)
    return losses, losses.sum() / jnp.minimum(t, window).astype(dtype)
