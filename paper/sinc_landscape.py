"""The sinc landscape, and what both methods do on it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj
from paper.instances import Instances, step_of
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
    tx = METHODS[method]
    step = step_of(tx, jax.value_and_grad(landscape))
    instances = Instances(*starts.shape[:2])

    def trajectory(start):
        def one(carry, _):
            (x, state), center = carry, optax.tree.get(carry[1], "center")
            x_next, state, value = step(x, state)
            leader = lj.diagnostics(state)[0].leader
            return (x_next, state), (x, value, leader, center and center.value)

        return jax.lax.scan(one, (start, tx.init(start)), length=iterations)[1]

    run = instances.map(trajectory)
    return Trajectories(*instances.fetch(run(instances.put(starts))))
