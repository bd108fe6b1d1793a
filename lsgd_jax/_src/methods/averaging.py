"""Averaging methods: every τ steps the workers' mean, or an outer step towards it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import (
    check_fraction,
    check_not_negative,
)
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Rule
from lsgd_jax._src.exchange.schedule import Period, Schedule, check_every
from lsgd_jax._src.methods.anchored import anchored
from lsgd_jax._src.methods.guard import Guard
from lsgd_jax._src.methods.merging import Merge
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.trees import Tree, value_at


@by_value
def average(axes: Axes = ("node", "local")) -> Rule:
    r"""The mean of the group's workers, as a rule of a pull.

    .. math:: z = \frac{1}{|H|} \sum_{i \in H} y_i

    with H the workers of the group whose y and loss are finite. Sums run in float32 at
    least.

    Args:
      axes: the mesh axes of the group.

    >>> import lsgd_jax as lj
    >>> lj.rules.average("local").axes
    'local'
    """

    def agree(group, x, y, state, takes_part, t):
        mean, count = group.masked_mean(y, takes_part)
        return mean, count > 0, state

    return Rule(
        axes,
        lambda params: (),
        agree,
        keeps=("reference", "error"),
        reads_x=False,
        is_common=True,
    )


@by_value
@takes_options()
def local_sgd(
    period: Period = 16,
    axes: Axes = ("node", "local"),
    mixing: float = 0.0,
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""Local SGD, or model averaging: the workers' mean every so many steps.

    With y = x + u the worker's parameters after its own step t = 1, 2, …:

    .. math::
      y_i \leftarrow m y_i + (1 - m) \frac{1}{W} \sum_j y_j
      \quad \text{if } t \bmod \tau = 0,

    τ the `period` and m the `mixing`. A worker whose y or loss is not finite is left out of
    the mean and takes it whole. Post-local SGD is
    ``optax.chain(allreduce(until=s), base, local_sgd(period))``.

    Args:
      period: steps between exchanges, τ, or `Periods`.
      axes: the mesh axes of the group.
      mixing: the share of its own parameters that a worker keeps, m in [0, 1).
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: a period below 1, a mixing outside [0, 1].

    Reference: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019,
    arXiv:1805.09767; Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020,
    arXiv:1808.07217 (post-local).

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.local_sgd(period=8))
    """
    check_every("period", period)
    check_fraction("mixing", mixing)
    return exchange(Pull(average(axes), 1 - mixing, every=period), **options)


@by_value
@takes_options()
def diloco(
    period: Period = 64,
    outer: optax.GradientTransformation | None = None,
    mixing: float = 0.0,
    axes: Axes = ("node", "local"),
    guard: Guard | None = None,
    restart: int | None = None,
    merge: Merge = "mean",
    weights: Sequence[float] | None = None,
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""DiLoCo: an outer optimizer moves an anchor by the workers' pseudo-gradient.

    .. math::
      \Delta = a - \frac{1}{W} \sum_j y_j, \qquad a \leftarrow a + \text{outer}(\Delta),
      \qquad y_i \leftarrow m y_i + (1 - m) a \quad \text{if } t \bmod \tau = 0,

    with y = x + u, Δ the pseudo-gradient, a the anchor (the mean of the starts at first), τ
    the `period` and m the `mixing`. The inner optimizers' states stay with their workers.
    outer(Δ) is the update that optax returns, which already has the sign of descent: -η Δ
    for SGD with rate η. Outer SGD with rate 1 and no momentum is local SGD.

    With F fragments and a delay d this is Streaming DiLoCo: the parameters are cut into F
    fragments, each with an anchor and an outer state of its own. Fragment i is sent at
    steps t ≡ (i + 1) τ / F - d (mod τ) and taken d steps later.

    With a `guard` it is EDiT: pseudo-gradients weigh by their norms, and anomalous ones are
    dropped. ``merge="radial"`` and `weights` are Decoupled DiLoCo's merge in lock step.

    Args:
      period: steps between exchanges of a fragment, τ, or `Periods`; 500 in the paper.
      outer: any optax transformation. Defaults to ``optax.sgd(0.7, momentum=0.9,
        nesterov=True)``.
      mixing: the share of its own parameters that a worker keeps, m in [0, 1).
      axes: the mesh axes of the group.
      guard: weighs pseudo-gradients by their norms and drops anomalous ones, see `Guard`.
        Each fragment has its own. By default all finite workers count alike.
      restart: exchanges after which the outer momentum is set to 0. Defaults to never.
      merge: how pseudo-gradients become one: their 'mean', or 'radial', which keeps their
        norm. See `anchored`.
      weights: one number per worker of the group, in any unit. Defaults to equal weights.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain. The anchor and the
      outer state are kept once, in float32 at least.

    Raises:
      ValueError: a period below 1, fragments that do not divide it or are more than the
        leaves, a delay of τ or more, a mixing outside [0, 1], a radial merge in a
        narrow wire format, and what `anchored` refuses.

    Reference: Douillard et al., DiLoCo, 2023, arXiv:2311.08105; Douillard et al.,
    Streaming DiLoCo with overlapping communication, 2025, arXiv:2501.18512; for the
    options see `Guard` and `anchored`.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.adamw(1e-3), lj.diloco(period=500))
    """
    check_every("period", period)
    if outer is None:
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    check_fraction("mixing", mixing)
    rule = anchored(outer, axes, guard, restart, merge, weights)
    return exchange(Pull(rule, 1 - mixing, every=period), **options)


@by_value
@takes_options()
def slowmo(
    period: Period = 16,
    alpha: float = 1.0,
    beta: float = 0.5,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    axes: Axes = ("node", "local"),
    restart: int | None = None,
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""SlowMo: averaging with a slow momentum.

    .. math::
      m \leftarrow \beta m + \frac{1}{\eta_t} \Bigl(a - \frac{1}{W} \sum_j y_j \Bigr),
      \qquad
      a \leftarrow a - \alpha \eta_t m, \qquad
      y_i \leftarrow a \quad \text{if } t \bmod \tau = 0,

    with y = x + u, a the anchor (the mean of the starts at first), m the slow momentum
    (0 at first), η the base optimizer's learning rate and τ the `period`. α = 1, β = 0 is
    local SGD; α = 1, β > 0 is BMUF. Where η is 0, as at the start of a warm-up or the end
    of a decay, a moves by the workers' steps alone and m keeps β of its value.

    Args:
      period: steps between exchanges, τ, or `Periods`.
      alpha: the slow learning rate, α.
      beta: the slow momentum, β in [0, 1].
      learning_rate: η of the base optimizer, or a schedule of t = 1, 2, …. A constant rate
        cancels. Schedules of optax count from 0: for s(step) of the base pass
        ``lambda t: s(t - 1)``.
      axes: the mesh axes of the group.
      restart: S; every S-th exchange sets m to 0 before it renews it. Defaults to never.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain. Anchor and momentum
      are kept once, in float32 at least.

    Raises:
      ValueError: a period or a restart below 1, a momentum outside [0, 1].

    Reference: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020, arXiv:1910.00643.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.slowmo(period=12, beta=0.6, learning_rate=0.1))
    """
    check_every("period", period)
    check_fraction("beta", beta)
    check_not_negative("alpha", alpha)
    if not callable(learning_rate):
        check_not_negative("learning_rate", learning_rate)

    schedule = Schedule(period, after=options.get("after", 0))

    def rate(exchanges: Array) -> Any:
        return value_at(learning_rate, schedule.end_of(exchanges + 1))

    outer = slow_momentum(rate, alpha, beta)
    rule = anchored(outer, axes, restart=restart)
    return exchange(Pull(rule, 1.0, every=period), **options)


class SlowMomentum(NamedTuple):
    """The state of `slow_momentum`.

    Attributes:
      count: counts the exchanges, as the schedules of optax do.
      momentum: m, a tree like the parameters, in gradients and not in steps.
    """

    count: optax.ScaleByScheduleState
    momentum: Tree


def slow_momentum(
    rate: Callable[[Array], Any], alpha: float, beta: float
) -> optax.GradientTransformation:
    r"""SlowMo's outer step, in which no η is a divisor of what the anchor moves by.

    .. math::
      a \leftarrow a - \alpha \, (\beta \eta_k m + \Delta), \qquad
      m \leftarrow \beta m + \Delta / \eta_k

    A quotient that is not finite, such as that of η = 0, leaves m without a share of this
    Δ.

    Args:
      rate: η, a function of the number k of exchanges before, int32.
      alpha, beta: α and β, see `slowmo`.
    """

    def init(params: Tree) -> SlowMomentum:
        count = optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))
        return SlowMomentum(count, jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        del params
        k = jnp.asarray(state.count.count)
        eta = jnp.asarray(rate(k))

        def step(delta: Array, m: Array) -> Array:
            return -alpha * (beta * eta.astype(m.dtype) * m + delta)

        def renewed(delta: Array, m: Array) -> Array:
            share = delta / eta.astype(m.dtype)
            return beta * m + trees.finite_part(share)

        steps = jax.tree.map(step, updates, state.momentum)
        momentum = jax.tree.map(renewed, updates, state.momentum)
        count = optax.ScaleByScheduleState(optax.safe_increment(k))
        return steps, SlowMomentum(count, momentum)

    return optax.GradientTransformation(init, update)
