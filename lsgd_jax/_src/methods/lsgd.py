"""Leader SGD: workers are pulled to the best worker of their node and to the best of all.

Teng, Gao, Chalus, Choromanska, Goldfarb, Weller. Leader Stochastic Gradient Descent for
Distributed Training of Deep Learning Models. NeurIPS 2019, arXiv:1905.10395.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import (
    check_axes,
    check_fraction,
    check_positive_int,
)
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Order, Rule, always, fits_in_sums, in_order
from lsgd_jax._src.exchange.schedule import Period, check_every, constant
from lsgd_jax._src.methods.scores import recorded
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import lowest


class LeaderState(NamedTuple):
    """The state of `leader`.

    Attributes:
      losses: float [window], the last losses, a ring; per worker.
      score: float scalar, their mean; per worker.
      leader: int32 scalar, the leader that was elected last, an index in the group; -1
        before the first election; per worker, equal within the group.
      elected: that leader's parameters at the election, or None if no pull needs them; per
        worker, equal within the group.
    """

    losses: Array
    score: Array
    leader: Array
    elected: Tree | None

    def __lsgd_resized__(self) -> "LeaderState":
        """For `resize`: losses go with their worker, and no leader was elected yet."""
        return self._replace(leader=jnp.full_like(self.leader, -1))


@by_value
def leader(
    axes: Axes,
    window: int = 10,
    proximal: float = 0.0,
    keep: int = 1,
) -> Rule:
    r"""The worker with the lowest mean loss over the last steps, as a rule of a pull.

    .. math::
      \text{score}_i(t) = \frac{1}{\min(t, w)} \sum_{s > t - w} f_i(x_i(s)), \qquad
      z = y_l, \quad l = \arg\min_i \text{score}_i

    with w the window and f_i(x_i(s)) the loss (`value`) of worker i before its step
    s. Ties go to the lowest index; a worker whose score or y is not finite is
    never elected.

    With ``keep=k`` the target is the mean of the k workers of the lowest scores, or of all
    whose score and y are finite if they are fewer. k = W is `average`.

    Args:
      axes: the mesh axes of the group that elects.
      window: w, the number of losses that a score is the mean of.
      proximal: the strength with which every step pulls towards the leader elected last.
        Keeps a copy of its parameters if it is not 0.
      keep: k, the number of workers in the target.

    Raises:
      ValueError: a window or a number to keep below 1; in `update`, no loss, or one that
        is no scalar.

    >>> import lsgd_jax as lj
    >>> lj.rules.leader("local", window=3).axes
    'local'
    """
    check_positive_int("window", window)
    check_positive_int("keep", keep)

    def init(params: Tree) -> LeaderState:
        return LeaderState(
            losses=jnp.zeros([window], jnp.result_type(float)),
            score=jnp.asarray(jnp.inf, jnp.result_type(float)),
            leader=jnp.int32(-1),
            elected=params if proximal else None,
        )

    def step(u, x, state, loss, t):
        losses, score = recorded(state.losses, loss, t)
        state = state._replace(losses=losses, score=score)
        if proximal:
            weight = proximal * (state.leader >= 0).astype(jnp.float32)
            y = trees.plus(x, u)

            def pull(u, y, z):
                return u + weight * (trees.widened(z) - trees.widened(y))

            u = jax.tree.map(pull, u, y, state.elected)
        return u, state, jnp.isfinite(state.score)

    def agree(group, x, y, state, takes_part, t):
        scores = group.gather(jnp.where(takes_part, state.score, jnp.inf))
        first, found = lowest(scores)
        if keep == 1:
            z = group.broadcast(y, first)
        else:
            scores = jnp.where(jnp.isfinite(scores), scores, jnp.inf)
            are_lowest = jnp.argsort(jnp.argsort(scores)) < keep
            are_kept = are_lowest & jnp.isfinite(scores)
            z, _ = group.masked_mean(y, are_kept[group.index])
        state = state._replace(leader=jnp.where(found, first, state.leader))
        if proximal:
            state = state._replace(elected=trees.where(found, z, state.elected))
        return z, found, state

    return Rule(
        axes,
        init,
        agree,
        step,
        keeps=("reference",) if keep == 1 else ("reference", "error"),
        reads_x=False,
        is_common=True,
        steps_apart=not proximal,
        summable=always if keep == 1 else fits_in_sums,
    )


@by_value
@takes_options()
def lsgd(
    local_pull: optax.ScalarOrSchedule = 0.1,
    global_pull: optax.ScalarOrSchedule = 0.1,
    local_period: Period = 64,
    global_period: Period = 128,
    loss_window: int = 10,
    order: Order = "adapt_then_combine",
    local_proximal: float = 0.0,
    global_proximal: float = 0.0,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""Leader SGD: pulls towards the node's leader and towards the leader of all.

    With y = x + u the worker's parameters after its own step t = 1, 2, …:

    .. math::
      y &\leftarrow y - \lambda (y - \tilde x^j) && \text{if } t \bmod \tau = 0, \\
      y &\leftarrow y - \lambda_G (y - \tilde x) && \text{if } t \bmod \tau_G = 0,

    where λ, λ_G are `local_pull`, `global_pull`; τ, τ_G are `local_period`,
    `global_period`; :math:`\tilde x^j` is the y of the best worker in this worker's node
    and :math:`\tilde x` that of the best worker of all (see `leader`). If both are due the
    local pull comes first and the global one starts from its result.

    A worker whose loss window or y is not finite is never elected and takes the leader
    whole at the next pull. Put ``optax.apply_if_finite(base, n)`` around the base optimizer
    so that its momentum stays finite as well, and use `apply_updates`.

    With F fragments the parameters are cut into F parts that take turns: part i is pulled
    at steps t ≡ (i + 1) τ / F (mod τ) and t ≡ (i + 1) τ_G / F (mod τ_G), towards the leader
    at that step.

    Args:
      local_pull: pull towards the leader of the node, λ in [0, 1] or a schedule of t; 0
        switches the level off, communication included.
      global_pull: pull towards the leader of all workers, λ_G in [0, 1] or a schedule of
        t; 0 switches the level off.
      local_period: steps between pulls towards the node's leader, τ, or `Periods`.
      global_period: steps between pulls towards the leader of all, τ_G, or `Periods`; need
        not be a multiple of τ.
      loss_window: number of losses by which a worker is judged, the last ones (the paper:
        10 on CIFAR-10, 64 on ImageNet).
      order: 'adapt_then_combine' is Algorithm 1 of the paper; 'combine_then_adapt' its
        equation (2): both pulls are computed at x, before the step, and added.
      local_proximal: p. If it is not 0, every step also pulls towards the parameters that
        the node's leader had when it was elected, y ← y - (p / τ) (y - x̃ʲ). Keeps a copy of
        the parameters.
      global_proximal: p_G. If it is not 0, every step also pulls towards the parameters
        that the leader of all had when it was elected, y ← y - (p_G / τ_G) (y - x̃), before
        the local pull. Keeps a copy of the parameters.
      axes: the mesh axes over nodes and over the workers of a node. One axis is one node of
        all workers, whose leader is the leader of all.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain. `update` needs
      ``loss=`` (the worker's loss at x) and the parameters.

    Raises:
      ValueError: pulls outside [0, 1], periods or a window below 1, fragments that do not
        divide a period or are more than the leaves, a delay of τ or more, an unknown
        order, axes that are not one or two names.

    Reference: Teng et al., NeurIPS 2019, Algorithm 1 and equation (2).

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(
    ...     optax.sgd(0.1, momentum=0.9, nesterov=True),
    ...     lj.lsgd(local_pull=0.1, global_pull=0.1, local_period=4, global_period=16),
    ... )
    """
    check_positive_int("loss_window", loss_window)
    check_axes(axes)
    names = (axes,) if isinstance(axes, str) else axes
    if len(names) not in (1, 2):
        raise ValueError(f"`axes` must be one or two mesh axes, (node, local), got {axes=}")
    levels = (
        ("local", names[-1], local_pull, local_period, local_proximal),
        ("global", axes, global_pull, global_period, global_proximal),
    )
    pulls = []
    for name, group, strength, period, proximal in levels:
        check_every(f"{name}_period", period)
        check_fraction(f"{name}_proximal", proximal)
        if not callable(strength):
            check_fraction(f"{name}_pull", strength)
        off = isinstance(strength, int | float) and strength == 0 and proximal == 0
        per_step = 0.0
        if proximal:
            reason = "the proximal pull of a step is a share of the period"
            per_step = proximal / constant(f"{name}_period", period, reason)
        if not off:
            rule = leader(group, loss_window, per_step)
            rule = in_order(rule, order)
            pulls.append(Pull(rule, strength, every=period))
    return exchange(*pulls, **options)
