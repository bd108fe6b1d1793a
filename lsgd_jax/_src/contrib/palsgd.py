"""PALSGD: DiLoCo in which a share of the steps computes no gradient."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_not_negative
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Rule
from lsgd_jax._src.exchange.schedule import Period, check_every
from lsgd_jax._src.exchange.skips import Skips
from lsgd_jax._src.methods.anchored import AnchorState, anchored
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.trees import Tree, value_at, widened


@by_value
@takes_options(after="the first step alone is sure to have a gradient")
def palsgd(
    period: Period = 100,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    probability: float = 0.2,
    pull: float = 0.5,
    outer: optax.GradientTransformation | None = None,
    seed: int = 0,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""PALSGD: DiLoCo with steps towards the anchor in place of some gradient steps.

    .. math::
      x &\leftarrow x - \min\Bigl(1, \frac{\gamma_t \eta}{p}\Bigr) (x - a)
        && \text{with probability } p, \text{ without a gradient} \\
      x &\leftarrow x + \frac{u}{1 - p} && \text{otherwise} \\
      \Delta &= a - \frac{1}{W} \sum_j x_j, \qquad a \leftarrow a + \text{outer}(\Delta),
        \qquad x_i \leftarrow a && \text{if } t \bmod \tau = 0

    with x the worker's parameters, u the update of its base optimizer, which is
    proportional to the learning rate γ, a the anchor (the mean of the starts at first), p
    the `probability`, η the `pull` and τ the `period`. Steps of both kinds count. p = 0 is
    `diloco`. The first step has a gradient.

    A step without a gradient needs no batch, no forward pass and no base optimizer. All
    workers skip the same steps, which a loop knows beforehand: with ``phase =
    method.phase(t)``, it calls the training step if ``phase.needs_gradient``, and otherwise
    `Exchange.skip`, or `Around.skip`. A program that computes the gradient
    nevertheless ignores its update on such a step, but its base optimizer has seen it. A
    schedule in the base optimizer counts the gradients, not the steps.

    Args:
      period: steps between exchanges of a fragment, τ, or `Periods`.
      learning_rate: the base optimizer's γ, a number or a schedule of the step t = 1, 2, ….
      probability: the share of the steps without a gradient, p in [0, 1).
      pull: η, at least 0.
      outer: any optax transformation. Defaults to ``optax.sgd(0.25, momentum=0.9,
        nesterov=True)``.
      seed: of the draws.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain. The anchor and the
      outer state are kept once, in float32 at least.

    Raises:
      ValueError: a period below 1, a probability outside [0, 1), a negative pull or rate.

    Reference: Naganuma et al., Pseudo-Asynchronous Local SGD, TMLR 2025, arXiv:2504.18454.
    The equations are those of the released code, in which each worker draws by itself.

    >>> import lsgd_jax as lj
    >>> method = lj.contrib.palsgd(period=4, learning_rate=0.1, probability=0.5)
    >>> [method.phase(t).needs_gradient for t in range(1, 9)]
    [True, True, False, False, False, False, False, True]
    """
    check_every("period", period)
    check_not_negative("pull", pull)
    if not callable(learning_rate):
        check_not_negative("learning_rate", learning_rate)
    skips = Skips(probability, seed)
    if outer is None:
        outer = optax.sgd(0.25, momentum=0.9, nesterov=True)
    rule = anchored(outer, axes)
    if probability:
        rule = towards_the_anchor(rule, skips, learning_rate, pull)
    return exchange(Pull(rule, 1.0, every=period, skips=skips), **options)


@by_value
def towards_the_anchor(
    rule: Rule, skips: Skips, learning_rate: optax.ScalarOrSchedule, pull: float
) -> Rule:
    """Returns an `anchored` rule with the steps of `palsgd`."""
    probability = skips.probability

    def step(
        u: Tree, x: Tree, state: AnchorState, loss: Array | None, t: Array
    ) -> tuple[Tree, AnchorState, Any]:
        del loss
        rate = jnp.asarray(value_at(learning_rate, t), jnp.result_type(float))
        share = jnp.minimum(1, rate * pull / probability)
        is_skipped = skips.at(t)

        def moved(u: Array, x: Array, a: Array) -> Array:
            back = share.astype(u.dtype) * (a - widened(x)).astype(u.dtype)
            return jnp.where(is_skipped, back, u / (1 - probability))

        return jax.tree.map(moved, u, x, state.anchor.value), state, True

    return dataclasses.replace(rule, step=step, reads_x=True)
