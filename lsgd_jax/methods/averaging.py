"""Averaging methods: the workers' mean every τ steps, as it is or through an outer step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lsgd_jax import collectives
from lsgd_jax._types import Grouped, Shared, Tree
from lsgd_jax.checks import check_fraction, check_positive_int
from lsgd_jax.collectives import Axes, widened
from lsgd_jax.pull import (
    Target,
    all_finite,
    mean_of,
    observe,
    pull,
    quarantine,
    rate,
    sum_nbytes,
    tree_where,
)


def average(axes: Axes = ("node", "local")) -> Target:
    r"""The mean of the group's workers, as a target of `pull`.

    .. math:: z = \frac{1}{|H|} \sum_{i \in H} y_i

    with H the workers of the group whose y and loss are finite. Sums run in float32 at
    least.

    Args:
      axes: the mesh axes of the group.

    >>> average("local").axes
    'local'
    """

    def aim(y, state, healthy):
        sums, count = collectives.total(y, axes, healthy)
        return mean_of(sums, count), count > 0, state

    return Target(axes, lambda params: (), observe, aim, sum_nbytes)


class AnchorState(NamedTuple):
    """The state of `anchored`.

    Attributes:
      anchor: a, where the workers stood together after the last exchange; a tree like the
        parameters, in float32 at least; shared.
      outer: the outer optimizer's state; shared.
    """

    anchor: Shared[Tree] | Grouped[Tree]
    outer: Shared[Any] | Grouped[Any]


def anchored(outer: optax.GradientTransformation, axes: Axes = ("node", "local")) -> Target:
    r"""An anchor that an outer optimizer moves by the workers' way, as a target of `pull`.

    .. math::
      \Delta = a - \frac{1}{|H|} \sum_{i \in H} y_i, \qquad
      a \leftarrow a + \text{outer}(\Delta), \qquad z = a

    with H the workers of the group whose y and loss are finite. The anchor starts as the
    mean of the workers' starts.

    Args:
      outer: any optax transformation; its learning rate counts exchanges, not steps.
      axes: the mesh axes of the group.

    >>> anchored(optax.sgd(0.7)).axes
    ('node', 'local')
    """
    outer = optax.with_extra_args_support(outer)

    def init(params: Tree) -> AnchorState:
        wide = jax.tree.map(widened, params)
        anchor = collectives.mean(wide, axes, all_finite(params))
        equal = lambda tree: collectives.equal(tree, axes)
        return AnchorState(equal(anchor), equal(outer.init(anchor)))

    def aim(y, state, healthy):
        anchor, outer_state = state.anchor.value, state.outer.value
        sums, count = collectives.total(y, axes, healthy)
        way = jax.tree.map(jnp.subtract, anchor, mean_of(sums, count))
        step, moved = outer.update(way, outer_state, anchor)
        renewed = (optax.apply_updates(anchor, step), moved)
        anchor, outer_state = tree_where(count > 0, renewed, (anchor, outer_state))
        equal = lambda tree: collectives.equal(tree, axes)
        # The anchor is there to aim at even if nobody is healthy.
        return anchor, jnp.asarray(True), AnchorState(equal(anchor), equal(outer_state))

    return Target(axes, init, observe, aim, sum_nbytes)


def local_sgd(
    period: int = 16, axes: Axes = ("node", "local")
) -> optax.GradientTransformationExtraArgs:
    r"""Local SGD, or model averaging: the workers' mean every so many steps.

    With y = x + u the worker's parameters after its own step t = 1, 2, …:

    .. math:: y_i \leftarrow \frac{1}{W} \sum_j y_j \quad \text{if } t \bmod \tau = 0,

    τ the `period`. A worker whose y or loss is not finite is left out of the mean and
    takes it whole. Post-local SGD is
    ``optax.chain(allreduce(until=s), base, local_sgd(period))``.

    Args:
      period: τ, in steps.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: a period below 1.

    Reference: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019,
    arXiv:1805.09767; Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020,
    arXiv:1808.07217 (post-local).

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.local_sgd(period=8))
    """
    check_positive_int("period", period)
    return quarantine(pull(average(axes), 1.0, period))


def diloco(
    period: int = 64,
    outer: optax.GradientTransformation | None = None,
    axes: Axes = ("node", "local"),
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo: an outer optimizer moves an anchor by the way the workers went.

    .. math::
      \Delta = a - \frac{1}{W} \sum_j y_j, \qquad a \leftarrow a + \text{outer}(\Delta),
      \qquad y_i \leftarrow a \quad \text{if } t \bmod \tau = 0,

    with y = x + u, a the anchor (the mean of the starts at first) and τ the `period`. The
    inner optimizers' states stay with their workers. Outer SGD with rate 1 and no
    momentum is local SGD.

    Args:
      period: τ, in steps; 500 in the paper.
      outer: any optax transformation; None: ``optax.sgd(0.7, momentum=0.9,
        nesterov=True)``.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the last in its chain. The anchor and the
      outer state are kept once, in float32 at least.

    Raises:
      ValueError: a period below 1.

    Reference: Douillard et al., DiLoCo, 2023, arXiv:2311.08105.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.adamw(1e-3), lj.diloco(period=500))
    """
    check_positive_int("period", period)
    if outer is None:
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return quarantine(pull(anchored(outer, axes), 1.0, period))


def slowmo(
    period: int = 16,
    alpha: float = 1.0,
    beta: float = 0.5,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    axes: Axes = ("node", "local"),
) -> optax.GradientTransformationExtraArgs:
    r"""SlowMo: averaging with a slow momentum.

    .. math::
      m \leftarrow \beta m + \frac{1}{\eta_t} \Big(a - \frac{1}{W} \sum_j y_j \Big), \qquad
      a \leftarrow a - \alpha \eta_t m, \qquad
      y_i \leftarrow a \quad \text{if } t \bmod \tau = 0,

    with y = x + u, a the anchor (the mean of the starts at first), m the slow momentum
    (0 at first), η the base optimizer's learning rate and τ the `period`. α = 1, β = 0 is
    local SGD; α = 1, β > 0 is BMUF.

    Args:
      period: τ, in steps.
      alpha: α, the slow learning rate.
      beta: β in [0, 1], the slow momentum.
      learning_rate: η or a schedule of t; a constant one cancels.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the last in its chain. Anchor and momentum
      are kept once, in float32 at least.

    Raises:
      ValueError: a period below 1, a momentum outside [0, 1].

    Reference: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020, arXiv:1910.00643.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.slowmo(period=12, beta=0.6, learning_rate=0.1))
    """
    check_positive_int("period", period)
    check_fraction("beta", beta)
    eta = lambda exchanges: rate(learning_rate, period * (exchanges + 1))
    outer = optax.chain(
        optax.scale_by_schedule(lambda k: 1 / eta(k)),
        optax.trace(decay=beta),
        optax.scale_by_schedule(lambda k: -alpha * eta(k)),
    )
    return quarantine(pull(anchored(outer, axes), 1.0, period))
