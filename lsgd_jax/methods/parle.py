"""Parle: every worker smooths its own loss, and all are pulled together now and then.

Chaudhari, Baldassi, Zecchina, Soatto, Talwalkar, Oberman. Parle: parallelizing stochastic
gradient descent. 2017, arXiv:1707.00424.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax import collectives
from lsgd_jax._types import Grouped, Shared, Tree
from lsgd_jax.checks import check_fraction, check_not_negative, check_positive_int
from lsgd_jax.collectives import Axes, widened
from lsgd_jax.pull import (
    NO_PARAMS,
    Target,
    all_finite,
    mean_of,
    observe_step,
    plus,
    pull,
    quarantine,
    rate,
    step_towards,
    sum_nbytes,
    tree_where,
)


class ParleState(NamedTuple):
    """The state of Parle's exchange.

    Attributes:
      anchor: x_a, where this worker's inner loop started; a tree like the parameters, in
        float32 at least; per worker.
      average: z, the running average of the inner loop; likewise.
      center: x̄, the mean of the anchors, likewise; shared. The model to test.
      step: int32 scalar, steps so far; shared.
    """

    anchor: Tree
    average: Tree
    center: Shared[Tree] | Grouped[Tree]
    step: Shared[Array]


def parle(
    learning_rate: optax.ScalarOrSchedule,
    period: int = 25,
    anchor_pull: optax.ScalarOrSchedule = 0.01,
    center_pull: optax.ScalarOrSchedule = 1.0,
    decay: float = 0.75,
    outer_learning_rate: optax.ScalarOrSchedule | None = None,
    axes: Axes = ("node", "local"),
) -> optax.GradientTransformationExtraArgs:
    r"""Parle: an inner loop around an anchor, and anchors that are pulled to their mean.

    With y the worker's parameters, u its update, at every step:

    .. math::
      y \leftarrow y + u - \eta \gamma^{-1} (y - x_a), \qquad
      z \leftarrow \beta z + (1 - \beta) y,

    and if t mod L = 0, with :math:`\bar x` the mean of all :math:`x_a` at the last
    exchange:

    .. math::
      x_a \leftarrow x_a - \eta' \big((x_a - z) + \rho^{-1} (x_a - \bar x)\big), \qquad
      y \leftarrow x_a, \quad z \leftarrow x_a.

    η is the `learning_rate`, η' the `outer_learning_rate`, L the `period`, γ⁻¹ and ρ⁻¹
    `anchor_pull` and `center_pull`, β the `decay`. ρ⁻¹ = 0 is Entropy-SGD; L = 1, γ⁻¹ = 0
    is elastic SGD; L = 1, γ⁻¹ = ρ⁻¹ = 0 is SGD, of steps η' (1 - β) u, as u is seen
    through z. The mean of the anchors, which `lsgd_jax.center` returns, is the model to
    test. A worker whose y or loss is not finite is left out of the mean and takes it.

    Args:
      learning_rate: η, that of the base optimizer, or a schedule of t.
      period: L, in steps.
      anchor_pull: γ⁻¹ ≥ 0, or a schedule of t (see `scoping`).
      center_pull: ρ⁻¹ ≥ 0, or a schedule of t.
      decay: β in [0, 1].
      outer_learning_rate: η', or a schedule of t; None: the same as η.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: a period below 1, a negative pull, a decay outside [0, 1].

    Reference: Chaudhari et al., 2017, arXiv:1707.00424, equations (8).

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.parle(learning_rate=0.1, period=25))
    """
    check_positive_int("period", period)
    check_fraction("decay", decay)
    for name, strength in (("anchor_pull", anchor_pull), ("center_pull", center_pull)):
        if not callable(strength):
            check_not_negative(name, strength)
    outer = learning_rate if outer_learning_rate is None else outer_learning_rate

    def init(params: Tree) -> ParleState:
        wide = jax.tree.map(widened, params)
        center = collectives.mean(wide, axes, all_finite(params))
        equal = collectives.equal(center, axes)
        return ParleState(wide, wide, equal, Shared(jnp.int32(0)))

    def aim(y, state, healthy):
        del y  # the inner loop's last point counts through its average only
        t, old = state.step.value, state.center.value
        eta, rho_inverse = rate(outer, t), rate(center_pull, t)
        move = lambda x, z, c: x - eta * ((x - z) + rho_inverse * (x - c))
        anchor = jax.tree.map(move, state.anchor, state.average, old)
        sums, count = collectives.total(anchor, axes, healthy)
        center = tree_where(count > 0, mean_of(sums, count), old)
        anchor = tree_where(healthy, anchor, center)
        equal = collectives.equal(center, axes)
        # The center is there to aim at even if nobody is healthy.
        found = jnp.asarray(True)
        return anchor, found, ParleState(anchor, anchor, equal, state.step)

    exchange = pull(Target(axes, init, observe_step, aim, sum_nbytes), 1.0, period)

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(NO_PARAMS)
        t, seen = state.count.value + 1, state.target
        weight = rate(learning_rate, t) * rate(anchor_pull, t)
        u = step_towards(updates, params, seen.anchor, weight)
        y = plus(params, u)
        mix = lambda z, y: decay * z + (1 - decay) * widened(y)
        # A step that is not finite must not stay in the average for ever.
        average = tree_where(
            all_finite(y), jax.tree.map(mix, seen.average, y), seen.average
        )
        target = seen._replace(average=average)
        state = dataclasses.replace(state, target=target)
        return exchange.update(u, state, params, **extra_args)

    return quarantine(optax.GradientTransformationExtraArgs(exchange.init, update))


def scoping(
    initial: float, batches_per_epoch: int, period: int = 25, largest: float = 1.0
) -> optax.Schedule:
    r"""Parle's scoping: pulls that grow as training goes on.

    .. math::
      \gamma^{-1}(t) = \min\big(\gamma_0^{-1} (1 - 1 / (2 B))^{-\lfloor t / L \rfloor},
      \, \gamma_{\min}^{-1}\big)

    Args:
      initial: the pull at first; the paper: 0.01 for the anchor, 1 for the center.
      batches_per_epoch: B.
      period: L, in steps.
      largest: where it stops; the paper: 1 for the anchor, 10 for the center.

    Returns:
      A schedule of t for `anchor_pull` or `center_pull`.

    Raises:
      ValueError: counts below 1, negative pulls.

    >>> [round(float(scoping(0.01, 1, period=2)(t)), 3) for t in (1, 2, 4, 100)]
    [0.01, 0.02, 0.04, 1.0]
    """
    check_positive_int("batches_per_epoch", batches_per_epoch)
    check_positive_int("period", period)
    check_not_negative("initial", initial)
    check_not_negative("largest", largest)
    shrink = 1 - 1 / (2 * batches_per_epoch)

    def schedule(t):
        loops = jnp.asarray(t // period, float)
        return jnp.minimum(initial * shrink**-loops, largest)

    return schedule
