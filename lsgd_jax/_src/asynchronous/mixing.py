"""What becomes of a worker's parameters when a peer's vector has arrived; compiled."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lsgd_jax._src.asynchronous.vectors import Flat
from lsgd_jax._src.movement import settle
from lsgd_jax._src.trees import Tree, all_finite, apply_updates, widen, widened


@jax.jit
def own_step(x: Tree, u: Tree, loss: Any) -> tuple[Tree, Any]:
    """x + u, and whether it and the loss are finite.

    Of a step whose loss is not finite only what stays finite is taken.
    """
    sound = jnp.isfinite(loss)
    y = apply_updates(x, settle(x, widen(u), sound, jnp.asarray(False)))
    return y, sound & all_finite(y)


@functools.partial(jax.jit, static_argnums=0)
def pulled(flat: Flat, y: Tree, z: Any, weight: Any, fit: Any) -> Tree:
    """y + λ (z - y) if y is fit, z whole if not or if λ is 1; z is a vector, and finite."""
    whole = ~jnp.asarray(fit) | (weight == 1)

    def leaf(y, z):
        near = widened(y)
        # To the bit, so that all who take the same z whole are the same.
        return jnp.where(whole, z, near + weight * (z - near)).astype(y.dtype)

    return jax.tree.map(leaf, y, flat.wide(z))


@functools.partial(jax.jit, static_argnums=0)
def shifted(flat: Flat, y: Tree, shift: Any) -> Tree:
    """y + a vector: what a worker has done since the vector was worked out stays."""
    return jax.tree.map(lambda a, b: (a + b).astype(a.dtype), y, flat.wide(shift))


@functools.partial(jax.jit, static_argnames="every")
def delayed_nesterov(
    outer: tuple[Any, Any, Any],
    gradient: Any,
    turn: Any,
    learning_rate: Any,
    momentum: Any,
    every: int,
) -> tuple[Any, Any, Any]:
    r"""An outer step: a pseudo-gradient g, number `turn` = 1, 2, … of those that came.

    .. math::
      s &\leftarrow s + g \\
      m &\leftarrow \beta m + s / N, \quad s \leftarrow 0 && \text{if } t \bmod N = 0 \\
      a &\leftarrow a - \eta \, (g / N + \beta m \, [t \bmod N = 0])

    Args:
      outer: (a, m, s), the anchor, its momentum and what came since that was renewed.
      gradient, turn, learning_rate, momentum, every: g, t, η, β, N.
    """
    anchor, m, gathered = outer
    gathered = gathered + gradient
    renewed = turn % every == 0
    m = jnp.where(renewed, momentum * m + gathered / every, m)
    step = gradient / every + jnp.where(renewed, momentum * m, 0)
    return anchor - learning_rate * step, m, jnp.where(renewed, 0, gathered)
