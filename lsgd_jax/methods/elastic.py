"""Elastic averaging and DOWNPOUR: a center that the workers pull along."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax import collectives
from lsgd_jax._types import Grouped, Shared, Tree
from lsgd_jax.checks import check_fraction, check_positive_int
from lsgd_jax.collectives import Axes, widened
from lsgd_jax.pull import (
    Order,
    Target,
    all_finite,
    observe_step,
    pull,
    quarantine,
    rate,
    sum_nbytes,
    tree_where,
)


class CenterState(NamedTuple):
    """The state of `moving_center`.

    Attributes:
      center: c, a tree like the parameters, in float32 at least; shared. The model to test.
      step: int32 scalar, steps so far; shared.
    """

    center: Shared[Tree] | Grouped[Tree]
    step: Shared[Array]


def moving_center(
    strength: optax.ScalarOrSchedule,
    renewed: bool = False,
    axes: Axes = ("node", "local"),
) -> Target:
    r"""A center that every worker pulls to itself, as a target of `pull`.

    .. math:: c \leftarrow c + \alpha(t) \sum_{i \in H} (y_i - c)

    with H the workers of the group whose y and loss are finite. The center starts as the
    mean of the workers' starts. With a single worker in the group it is that worker.

    Args:
      strength: α, or a schedule of t.
      renewed: whether the target is the new center; otherwise it is the old one.
      axes: the mesh axes of the group.

    >>> moving_center(0.1).axes
    ('node', 'local')
    """

    def init(params: Tree) -> CenterState:
        wide = jax.tree.map(widened, params)
        center = collectives.mean(wide, axes, all_finite(params))
        return CenterState(collectives.equal(center, axes), Shared(jnp.int32(0)))

    def aim(y, state, healthy):
        old = state.center.value
        gaps = jax.tree.map(lambda y, c: widened(y) - c, y, old)
        sums, _ = collectives.total(gaps, axes, healthy)
        alpha = rate(strength, state.step.value)
        center = jax.tree.map(lambda c, s: (c + alpha * s).astype(c.dtype), old, sums)
        target = center if renewed else old
        if collectives.size(axes) == 1:
            target = center = tree_where(healthy, y, old)
        state = state._replace(center=collectives.equal(center, axes))
        # The center is there to aim at even if nobody is healthy.
        return target, jnp.asarray(True), state

    return Target(axes, init, observe_step, aim, sum_nbytes)


def easgd(
    beta: optax.ScalarOrSchedule = 0.43,
    period: int = 16,
    order: Order = "adapt_then_combine",
    axes: Axes = ("node", "local"),
) -> optax.GradientTransformationExtraArgs:
    r"""Elastic averaging SGD: workers and center pull at each other.

    With y = x + u the worker's parameters after its own step t = 1, 2, …, if t mod τ = 0:

    .. math::
      y_i \leftarrow y_i - \alpha (y_i - c), \qquad
      c \leftarrow (1 - \beta) c + \beta \frac{1}{W} \sum_j y_j, \qquad \alpha = \beta / W,

    with the old values on both right sides, c the center (the mean of the starts at
    first), W the number of workers, τ the `period`. The exchange conserves Σ y_i + c. The
    center, which `lsgd_jax.center` returns, is the model to test. With a Nesterov base
    optimizer this is EAMSGD. A single worker has nobody to share with: it is the center.

    A worker whose y or loss is not finite is left out (its share of β stays with the
    center) and takes the center whole.

    Args:
      beta: β in [0, 1] or a schedule of t.
      period: τ, in steps.
      order: 'combine_then_adapt' is the paper's form: x in place of y, and u added after.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the last in its chain. The center is kept
      once, in float32 at least.

    Raises:
      ValueError: β outside [0, 1], a period below 1, an unknown order.

    Reference: Zhang, Choromanska, LeCun, Deep Learning with Elastic Averaging SGD,
    NeurIPS 2015, arXiv:1412.6651.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.easgd(beta=0.43, period=4))
    """
    if not callable(beta):
        check_fraction("beta", beta)
    check_positive_int("period", period)
    alpha = lambda t: rate(beta, t) / collectives.size(axes)
    return quarantine(pull(moving_center(alpha, axes=axes), alpha, period, order))


def downpour(
    period: int = 16, axes: Axes = ("node", "local")
) -> optax.GradientTransformationExtraArgs:
    r"""DOWNPOUR, synchronous: the center takes everybody's way, and everybody the center.

    With y = x + u the worker's parameters after its own step t = 1, 2, …, if t mod τ = 0:

    .. math::
      c \leftarrow c + \sum_i (y_i - c), \qquad y_i \leftarrow c,

    with c the center (the mean of the starts at first) and τ the `period`. c is where all
    workers stood after the last exchange, so the sum is over the ways they went since.
    The center, which `lsgd_jax.center` returns, is the model to test. A worker whose y or
    loss is not finite is left out and takes the center whole.

    Args:
      period: τ, in steps.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the last in its chain. The center is kept
      once, in float32 at least.

    Raises:
      ValueError: a period below 1.

    Reference: Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.01), lj.downpour(period=4))
    """
    check_positive_int("period", period)
    return quarantine(pull(moving_center(1.0, renewed=True, axes=axes), 1.0, period))
