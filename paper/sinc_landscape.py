"""The sinc landscape, and what both methods do on it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj
from paper.descent import descent
from paper.methods import easgd, lgd


METHODS = {"LGD": lgd(0.1, pull=0.1), "EASGD": easgd(0.1, beta=0.43)}
STARTS = np.array([(-6, -4), (-15, -18), (20, 11), (17, 8)], float)
RING, MINIMUM = 1.43030, -0.217234  # of the global minimum
REACHED = -0.2170  # by a worker on that ring


def landscape(position: jax.Array) -> jax.Array:
    """L at a position [2]: the sinc of its distance from the origin, 1 there.

    >>> round(float(landscape(jnp.array([0.0, 1.5]))), 6)
    -0.212207
    """
    return jnp.sinc(optax.safe_norm(position, 1e-12))


class Trajectories(NamedTuple):
    """What every worker did, the start included: arrays [instances, W, iterations, ...].

    Attributes:
      position: float64 [..., 2].
      value: float64, L at the position.
      leader: int32, who led there, or None.
      center: float64 [..., 2], the center by then, or None.
    """

    position: np.ndarray
    value: np.ndarray
    leader: np.ndarray | None
    center: np.ndarray | None


def descend(method: str, starts: np.ndarray, iterations: int) -> Trajectories:
    """Runs all workers of all instances from starts [instances, W, 2], in one call."""
    value_and_grad = jax.value_and_grad(landscape)

    def look(before, after, value):
        (x, state), (_, after_state) = before, after
        center, leader = (
            optax.tree.get(state, "center"),
            lj.diagnostics(after_state)[0].leader,
        )
        return x, value, leader, center and center.value

    run = descent(lambda: METHODS[method], lambda x, k: value_and_grad(x), iterations, look)
    return Trajectories(*run(starts)[0])
