"""Many independent copies of a small descent, run as one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj


Method = Callable[..., optax.GradientTransformationExtraArgs]


def descent(
    method: Method,
    value_and_grad: Callable,
    steps: int = 1,
    look: Callable = lambda before, after, value: None,
) -> Callable[..., tuple[Any, np.ndarray]]:
    """Makes a function that runs a method in many instances, with W workers in each.

    Every instance is a node. The workers of a node communicate only with one another if
    their method's only axis is 'local' (as in `paper.methods`), so that instances are
    independent.

    Args:
      method: makes the method of an instance from its data.
      value_and_grad: (x, k, *data) -> (loss, gradient) at step k, counted from 0.
      steps: steps of every worker.
      look: (before, after, loss) -> arrays to record at each step. `before` and `after`
        are (x, state) around the step, the loss is that before it.

    Returns:
      A function (starts [instances, W, ...], shared, own) -> (recorded, ends), where the
      trees `shared` [instances, ...] and `own` [instances, W, ...] hold the data, those of
      an instance first. `recorded` is [instances, W, steps, ...].

    >>> from paper.methods import lgd
    >>> square = lambda x, k: (x**2 / 2, x)
    >>> half = descent(lambda: lgd(0.5, 0.0), square, 2, lambda before, *_: before[0])
    >>> recorded, ends = half(np.float32([[4, 8], [2, 6]]))
    >>> recorded.tolist(), ends.tolist()
    ([[[4.0, 2.0], [8.0, 4.0]], [[2.0, 1.0], [6.0, 3.0]]], [[1.0, 2.0], [0.5, 1.5]])
    """

    def run(start, shared, own):
        data = (*shared, *own)
        tx = method(*data)

        def step(before, k):
            x, state = before
            value, grad = value_and_grad(x, k, *data)
            updates, state = tx.update(grad, state, x, value=value)
            after = optax.apply_updates(x, updates), state
            return after, look(before, after, value)

        (end, _), recorded = jax.lax.scan(step, (start, tx.init(start)), jnp.arange(steps))
        return recorded, end

    @functools.cache
    def compiled(instances, workers):
        # On one device: more of them would only wait for one another.
        one = jax.devices()[:1]
        grid = lj.Workers(nodes=instances, locals=workers, devices=one)
        return grid, grid.map(run)

    def descend(starts, shared=(), own=()):
        count, workers = starts.shape[:2]
        grid, run = compiled(count, workers)
        each = lambda tree: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
        copies = jax.tree.map(lambda x: np.repeat(x, workers, axis=0), shared)
        found = grid.fetch(run(*grid.put((each(starts), copies, each(own)))))
        return jax.tree.map(lambda x: x.reshape(count, workers, *x.shape[1:]), found)

    return descend
