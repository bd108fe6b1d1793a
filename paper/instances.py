"""Many independent copies of a small experiment, run as one."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import lsgd_jax as lj


class Instances:
    """Instances of an experiment with W workers each: every instance is a node.

    The workers of a node communicate only with one another if their method's only axis
    is 'local' (as in `paper.methods`), so that instances are independent.

    Args:
      count: how many instances.
      workers: W, the workers of each.

    Attributes:
      map: turns a function written for one worker into one over all of them.

    >>> import jax.numpy as jnp
    >>> pairs = Instances(2, workers=2)
    >>> total = pairs.map(lambda x: lj.Group("local").masked_sum(x, True)[0])
    >>> pairs.fetch(total(pairs.put(np.float32([[1, 2], [3, 4]])))).tolist()
    [[3.0, 3.0], [7.0, 7.0]]
    """

    def __init__(self, count: int, workers: int):
        # On one device: more of them would only wait for one another.
        one = jax.devices()[:1]
        self._grid = lj.Workers(nodes=count, locals=workers, devices=one)
        self.map = self._grid.map

    def put(self, tree: Any) -> Any:
        """Places a tree with leaves [instances, W, ...]."""
        return self._grid.put(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree))

    def share_out(self, tree: Any) -> Any:
        """Places a tree with leaves [instances, ...]: all workers of one get the same."""
        rows = lambda x: np.repeat(x, self._grid.locals, axis=0)
        return self._grid.put(jax.tree.map(rows, tree))

    def fetch(self, tree: Any) -> Any:
        """The workers' tree on the host, leaves [instances, W, ...]."""
        shape = (self._grid.nodes, self._grid.locals)
        return jax.tree.map(
            lambda x: x.reshape(*shape, *x.shape[1:]), self._grid.fetch(tree)
        )


def step_of(
    tx: optax.GradientTransformationExtraArgs, value_and_grad: Callable
) -> Callable:
    """One worker's step: (x, state, *data) -> (x, state, loss before the step)."""

    def step(x, state, *data):
        value, grad = value_and_grad(x, *data)
        updates, state = tx.update(grad, state, x, value=value)
        return optax.apply_updates(x, updates), state, value

    return step
