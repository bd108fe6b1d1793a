"""Parle: every worker smooths its own loss, and the workers are pulled together at times.

Chaudhari, Baldassi, Zecchina, Soatto, Talwalkar, Oberman. Parle: parallelizing stochastic
gradient descent. 2017, arXiv:1707.00424.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_fraction, check_not_negative, check_positive_int
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Rule, fits_in_sums
from lsgd_jax._src.shared import Axes, Shared
from lsgd_jax._src.trees import Tree, value_at, widened
from lsgd_jax._src.wire.group import Group


class ParleState(NamedTuple):
    """The state of Parle's exchange.

    Attributes:
      anchor: x_a, where this worker's inner loop started; a tree like the parameters, in
        float32 at least; per worker.
      average: z, the running average of the inner loop; likewise.
      center: x̄, the mean of the anchors, likewise; shared. The model to test.
    """

    anchor: Tree
    average: Tree
    center: Shared[Tree]

    def __lsgd_center__(self) -> Shared[Tree]:
        """For `center`."""
        return self.center


@by_value
@takes_options()
def parle(
    learning_rate: optax.ScalarOrSchedule,
    period: int = 25,
    anchor_pull: optax.ScalarOrSchedule = 0.01,
    center_pull: optax.ScalarOrSchedule = 1.0,
    decay: float = 0.75,
    outer_learning_rate: optax.ScalarOrSchedule | None = None,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""Parle: an inner loop around an anchor, and anchors that are pulled to their mean.

    With y the worker's parameters, u its update, at every step:

    .. math::
      y \leftarrow y + u - \eta \gamma^{-1} (y - x_a), \qquad
      z \leftarrow \beta z + (1 - \beta) y,

    and if t mod L = 0, with :math:`\bar x` the mean of all :math:`x_a` at the last
    exchange:

    .. math::
      x_a \leftarrow x_a - \eta' \bigl((x_a - z) + \rho^{-1} (x_a - \bar x)\bigr), \qquad
      y \leftarrow x_a, \quad z \leftarrow x_a.

    η is the `learning_rate`, η' the `outer_learning_rate`, L the `period`, γ⁻¹ and ρ⁻¹
    `anchor_pull` and `center_pull` (`scoping` makes schedules of them), β the `decay`.
    ρ⁻¹ = 0 is Entropy-SGD; L = 1, γ⁻¹ = 0 is elastic SGD; L = 1, γ⁻¹ = ρ⁻¹ = 0 is SGD with
    steps η' (1 - β) u, since u acts through z. The mean of the anchors, which
    `lsgd_jax.center` returns, is the model to test. A worker whose y or loss is not finite
    is left out of the mean and takes it whole.

    Args:
      learning_rate: η, that of the base optimizer, or a schedule of t.
      period: steps of the inner loop, L.
      anchor_pull: pull of the anchor on the inner loop, γ⁻¹ ≥ 0, or a schedule of t.
      center_pull: pull of the center on the anchors, ρ⁻¹ ≥ 0, or a schedule of t.
      decay: decay of the inner loop's running average, β in [0, 1].
      outer_learning_rate: learning rate of the anchor's step, η', or a schedule of t;
        None: that of the base optimizer, η.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

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
    if not callable(outer):
        name = "learning_rate" if outer_learning_rate is None else "outer_learning_rate"
        check_not_negative(name, outer)

    def init(params: Tree) -> ParleState:
        wide = trees.widened(params)
        return ParleState(wide, wide, Group(axes).start(params))

    def step(u, x, state, loss, t):
        weight = value_at(learning_rate, t) * value_at(anchor_pull, t)

        def pull(u, x, a):
            return u + weight * (a - widened(x))

        u = jax.tree.map(pull, u, x, state.anchor)

        def mix(z, y):
            # A step that is not finite must not stay in the average forever.
            return jnp.where(jnp.isfinite(y), decay * z + (1 - decay) * widened(y), z)

        average = jax.tree.map(mix, state.average, trees.plus(x, u))
        return u, state._replace(average=average), True

    def agree(group, x, y, state, takes_part, t):
        del y  # the anchor follows the inner loop's average, not its last point
        old = state.center.value
        eta = value_at(outer, t)
        rho_inverse = value_at(center_pull, t)

        def move(x, z, c):
            return x - eta * ((x - z) + rho_inverse * (x - c))

        anchor = jax.tree.map(move, state.anchor, state.average, old)
        mean, count = group.masked_mean(anchor, takes_part, reference=old)
        mean = group.movable(mean, old)
        # The center is there to be pulled to even if no worker is finite.
        center = trees.where(count > 0, mean, old)
        anchor = trees.where(takes_part, anchor, center)
        state = ParleState(anchor, anchor, group.shared(center))
        return anchor, jnp.asarray(True), state

    def summable(group, y, state):
        return fits_in_sums(group, (y, state.rule.average), state)

    rule = Rule(axes, init, agree, step, keeps=("error",), summable=summable)
    return exchange(Pull(rule, 1.0, every=period), **options)


def scoping(
    initial: float, batches_per_epoch: int, period: int = 25, largest: float = 1.0
) -> optax.Schedule:
    r"""Parle's scoping: a pull that grows during training.

    .. math::
      \gamma^{-1}(t) = \min\bigl(\gamma_0^{-1} (1 - 1 / (2 B))^{-\lfloor t / L \rfloor},
      \, \gamma_{\min}^{-1}\bigr)

    Args:
      initial: the pull at the first step; 0.01 for the anchor and 1 for the center in the
        paper.
      batches_per_epoch: the number B of batches in an epoch.
      period: steps of the inner loop, L.
      largest: the upper bound of the pull; 1 for the anchor and 10 for the center in the
        paper.

    Returns:
      A schedule of t for `anchor_pull` or `center_pull`.

    Raises:
      ValueError: counts below 1, negative pulls.

    >>> import lsgd_jax as lj
    >>> [round(float(lj.scoping(0.01, 1, period=2)(t)), 3) for t in (1, 2, 4, 100)]
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
