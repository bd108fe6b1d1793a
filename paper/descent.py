"""The paper's two methods in its own form, and many independent runs of one as one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj


Rate = optax.ScalarOrSchedule
MethodFactory = Callable[..., optax.GradientTransformationExtraArgs]


def lgd(learning_rate: Rate, pull: Rate) -> optax.GradientTransformationExtraArgs:
    r"""Leader gradient descent, the paper's equation (2), at every step.

    .. math::
      x_i \leftarrow x_i - \eta \nabla f(x_i) - \lambda (x_i - x_l),
      \qquad l = \arg\min_j f(x_j)

    for all workers i of a node at once, with η the learning rate and λ the pull. Both are
    numbers or schedules. η is called with the number of earlier steps, λ with the number
    of the step, counted from 1.
    """
    leader = lj.lsgd(
        local_pull=pull,
        global_pull=0.0,
        local_period=1,
        loss_window=1,
        order="combine_then_adapt",
    )
    return optax.chain(optax.sgd(learning_rate), leader)


def easgd(learning_rate: Rate, beta: Rate) -> optax.GradientTransformationExtraArgs:
    r"""Elastic averaging gradient descent, at every step.

    .. math::
      x_i \leftarrow x_i - \eta \nabla f(x_i) - \frac{\beta}{W} (x_i - c), \qquad
      c \leftarrow (1 - \beta) c + \beta \frac{1}{W} \sum_j x_j

    with the old values on both right sides. W is the number of workers of a node and c
    their center, which begins at the mean of their starts.
    """
    elastic = lj.easgd(beta, period=1, order="combine_then_adapt", axes="local")
    return optax.chain(optax.sgd(learning_rate), elastic)


def descent(
    method: MethodFactory,
    value_and_grad: Callable,
    steps: int = 1,
    look: Callable = lambda before, after, value: None,
) -> Callable[..., tuple[Any, np.ndarray]]:
    """Returns a function that runs a method in many instances, with W workers in each.

    Every instance is a node. Instances are independent if the method's only axis is
    'local', as with `lgd` and `easgd`: no worker then communicates outside its node.

    Args:
      method: makes the method of an instance from its data.
      value_and_grad: (x, k, *data) -> (loss, gradient) at step k, counted from 0.
      steps: steps of every worker.
      look: (before, after, loss) -> arrays to record at each step. `before` and `after`
        are (x, state) around the step; the loss is the one before it.

    Returns:
      A function (starts [instances, W, ...], shared, own) -> (recorded, ends). The trees
      `shared` [instances, ...] and `own` [instances, W, ...] hold the data, which the
      method and the loss receive in this order. `recorded` is [instances, W, steps, ...].

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
        # On one device, because several would only wait for one another.
        one = jax.devices()[:1]
        grid = lj.Workers(nodes=instances, locals=workers, devices=one)
        return grid, grid.map(run)

    def descend(starts, shared=(), own=()):
        count, workers = starts.shape[:2]
        grid, run = compiled(count, workers)

        def each(tree):
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

        copies = jax.tree.map(lambda x: np.repeat(x, workers, axis=0), shared)
        found = grid.fetch(run(*grid.put((each(starts), copies, each(own)))))
        return jax.tree.map(lambda x: x.reshape(count, workers, *x.shape[1:]), found)

    return descend
