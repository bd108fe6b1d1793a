"""Leader SGD: workers are pulled to the best worker of their node and to the best of all.

Teng, Gao, Chalus, Choromanska, Goldfarb, Weller. Leader Stochastic Gradient Descent for
Distributed Training of Deep Learning Models. NeurIPS 2019, arXiv:1905.10395.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax import collectives
from lsgd_jax._types import Tree
from lsgd_jax.checks import check_fraction, check_positive_int
from lsgd_jax.collectives import Axes
from lsgd_jax.pull import Order, Target, nbytes, plus, pull, quarantine, step_towards


class LeaderState(NamedTuple):
    """What a worker knows of its group's leader.

    Attributes:
      losses: float [window], the last losses, a ring; per worker.
      score: float scalar, the mean of the losses measured so far; per worker.
      leader: int32 scalar, who led at the last pull, an index in the group; -1 before
        the first; per worker, equal within the group.
      elected: the leader's parameters at the last pull, or None if nobody needs them;
        per worker, equal within the group.
    """

    losses: Array
    score: Array
    leader: Array
    elected: Tree | None

    def resized(self) -> "LeaderState":
        """For `resize`: losses go with their worker, and nobody was elected yet."""
        return self._replace(leader=jnp.full_like(self.leader, -1))


def leader(axes: Axes, window: int = 10, remember: bool = False) -> Target:
    r"""The worker with the lowest mean loss over the last steps, as a target of `pull`.

    .. math::
      \text{score}_i(t) = \frac{1}{\min(t, w)} \sum_{s > t - w} f_i(x_i(s)), \qquad
      z = y_l, \quad l = \arg\min_i \text{score}_i

    with w the window and f_i(x_i(s)) the loss (`value`) of worker i at step s, before
    that step. Ties go to the lowest index; a worker whose score or y is not finite is
    never elected.

    Args:
      axes: the mesh axes of the group that elects.
      window: w, the number of losses that a score is the mean of.
      remember: keep a copy of the last leader's parameters in the state.

    Raises:
      ValueError: a window below 1; in `update`, no `value`, or one that is no scalar.

    >>> leader("local", window=3).axes
    'local'
    """
    check_positive_int("window", window)

    def init(params: Tree) -> LeaderState:
        return LeaderState(
            losses=jnp.zeros([window], jnp.result_type(float)),
            score=jnp.asarray(jnp.inf, jnp.result_type(float)),
            leader=jnp.int32(-1),
            elected=params if remember else None,
        )

    def observe(state, value, count):
        if value is None or jnp.shape(value) != ():
            raise ValueError(
                "the leader is elected by each worker's loss, a scalar: call "
                f"`tx.update(grads, state, params, value=loss)`, got {value=}"
            )
        losses = state.losses.at[(count - 1) % window].set(value)
        score = losses.sum() / jnp.minimum(count, window)  # never what was not measured
        return state._replace(losses=losses, score=score), jnp.isfinite(score)

    def aim(y, state, healthy):
        score = jnp.where(healthy, state.score, jnp.inf)
        first, found = collectives.elect(score, axes)
        z = collectives.take_from(y, first, axes)
        seen = jnp.where(found, first, state.leader)
        if remember:
            kept = jax.tree.map(lambda z, e: jnp.where(found, z, e), z, state.elected)
            state = state._replace(elected=kept)
        return z, found, state._replace(leader=seen)

    def payload(params: Tree) -> int:
        return nbytes(params) + jnp.dtype(jnp.result_type(float)).itemsize

    return Target(axes, init, observe, aim, payload)


def lsgd(
    local_pull: optax.ScalarOrSchedule = 0.1,
    global_pull: optax.ScalarOrSchedule = 0.1,
    local_period: int = 64,
    global_period: int = 128,
    loss_window: int = 10,
    order: Order = "adapt_then_combine",
    local_proximal: float = 0.0,
    global_proximal: float = 0.0,
    node_axis: str = "node",
    local_axis: str = "local",
) -> optax.GradientTransformationExtraArgs:
    r"""Leader SGD: pulls towards the node's leader and towards the leader of all.

    With y = x + u the worker's parameters after its own step t = 1, 2, …:

    .. math::
      y &\leftarrow y - \lambda (y - \tilde x^j) && \text{if } t \bmod \tau = 0, \\
      y &\leftarrow y - \lambda_G (y - \tilde x) && \text{if } t \bmod \tau_G = 0,

    where λ, λ_G are `local_pull`, `global_pull`; τ, τ_G are `local_period`,
    `global_period`; :math:`\tilde x^j` is the y of the best worker in this worker's node
    and :math:`\tilde x` that of the best worker of all (see `leader`). If both are due the
    local pull comes first and the global one starts from its result.

    A worker whose loss window or y is not finite leads nobody and takes the leader whole
    at the next pull; until then it stays at its last finite parameters (see
    `quarantine`). Put ``optax.apply_if_finite(base, n)`` around the base optimizer so that
    its momentum stays finite as well.

    Args:
      local_pull: λ in [0, 1] or a schedule of t; 0 switches the local level off,
        communication included.
      global_pull: λ_G, likewise.
      local_period: τ, in steps.
      global_period: τ_G, in steps; need not be a multiple of τ.
      loss_window: how many of the last losses a worker is judged by (the paper: 10 on
        CIFAR-10, 64 on ImageNet).
      order: 'adapt_then_combine' is Algorithm 1 of the paper; 'combine_then_adapt' its
        equation (2): both pulls are worked out at x, before the step, and added.
      local_proximal: p; if not 0, every step also pulls towards the leaders elected
        last, :math:`y \leftarrow y - (p / \tau)(y - \tilde x^j)`, after the same with
        p_G / τ_G and the leader of all. Keeps a copy of the parameters.
      global_proximal: p_G, likewise.
      node_axis: the mesh axis over nodes.
      local_axis: the mesh axis over the workers of a node.

    Returns:
      An optax transformation for one worker, the last in its chain. `update` needs
      ``value=`` (the worker's loss at x) and the parameters.

    Raises:
      ValueError: pulls outside [0, 1], periods or a window below 1, an unknown order.

    Reference: Teng et al., NeurIPS 2019, Algorithm 1 and equation (2).

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(
    ...     optax.sgd(0.1, momentum=0.9, nesterov=True),
    ...     lj.lsgd(local_pull=0.1, global_pull=0.1, local_period=16, global_period=64),
    ... )
    """
    check_positive_int("loss_window", loss_window)
    levels, weights = [], []

    def add_level(name, axes, strength, period, near):
        check_positive_int(f"{name}_period", period)
        check_fraction(f"{name}_proximal", near)
        if not callable(strength):
            check_fraction(f"{name}_pull", strength)
            if strength == 0 and near == 0:
                return
        target = leader(axes, loss_window, remember=near > 0)
        levels.append(pull(target, strength, period, order))
        weights.append(near / period)

    everybody = (node_axis, local_axis)
    add_level("local", local_axis, local_pull, local_period, local_proximal)
    add_level("global", everybody, global_pull, global_period, global_proximal)
    if not levels:
        return optax.with_extra_args_support(optax.identity())
    return quarantine(_proximal(optax.chain(*levels), weights))


def _proximal(
    levels: optax.GradientTransformationExtraArgs, weights: list[float]
) -> optax.GradientTransformationExtraArgs:
    """First pulls y towards the leaders elected last, the highest level first."""
    if not any(weights):
        return levels

    def update(updates, state, params=None, **extra_args):
        u = updates
        for weight, level in reversed(list(zip(weights, state))):
            if weight:
                elected_once = (level.target.leader >= 0).astype(jnp.float32)
                y = plus(params, u)
                u = step_towards(u, y, level.target.elected, weight * elected_once)
        return levels.update(u, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(levels.init, update)
