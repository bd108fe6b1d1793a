"""Elastic averaging and DOWNPOUR: a center that the workers pull along."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_fraction
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Order, Rule, in_order
from lsgd_jax._src.exchange.schedule import Period, check_every
from lsgd_jax._src.shared import Axes, Shared
from lsgd_jax._src.trees import Tree, value_at, widened
from lsgd_jax._src.wire.group import Group


class CenterState(NamedTuple):
    """The state of `moving_center`.

    Attributes:
      center: c, a tree like the parameters, in float32 at least; shared. The model to test.
    """

    center: Shared[Tree]

    def __lsgd_center__(self) -> Shared[Tree]:
        """For `center`."""
        return self.center


@by_value
def moving_center(
    strength: optax.ScalarOrSchedule,
    renewed: bool = False,
    axes: Axes = ("node", "local"),
) -> Rule:
    r"""A center that every worker pulls to itself, as a rule of a pull.

    .. math:: c \leftarrow c + \alpha(t) \sum_{i \in H} (y_i - c)

    with H the workers of the group whose y and loss are finite. The center starts as the
    mean of the workers' starts. With a single worker in the group it is that worker.

    Args:
      strength: α, or a schedule of t.
      renewed: whether the target is the new center and not the old one.
      axes: the mesh axes of the group.

    >>> import lsgd_jax as lj
    >>> lj.rules.moving_center(0.1).axes
    ('node', 'local')
    """

    def agree(group, x, y, state, takes_part, t):
        old = state.center.value
        gaps = jax.tree.map(lambda y, c: widened(y) - c, y, old)
        sums, _ = group.masked_sum(gaps, takes_part)
        sums = group.movable(sums, trees.zeros(sums))
        alpha = jnp.asarray(value_at(strength, t))

        def move(c, s):
            return c + (alpha.astype(s.dtype) * s).astype(c.dtype)

        center = jax.tree.map(move, old, sums)
        target = center if renewed else old
        if group.size == 1:
            target = center = trees.where(takes_part, y, old)
        # The center is there to be pulled to even if no worker is finite.
        return target, jnp.asarray(True), CenterState(group.shared(center))

    def init(params):
        return CenterState(Group(axes).start(params))

    return Rule(axes, init, agree, keeps=("error",), reads_x=False)


@by_value
@takes_options()
def easgd(
    beta: optax.ScalarOrSchedule = 0.43,
    period: Period = 16,
    order: Order = "adapt_then_combine",
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""Elastic averaging SGD: workers and center pull at each other.

    With y = x + u the worker's parameters after its own step t = 1, 2, …, if t mod τ = 0:

    .. math::
      y_i \leftarrow y_i - \alpha (y_i - c), \qquad
      c \leftarrow (1 - \beta) c + \beta \frac{1}{W} \sum_j y_j, \qquad \alpha = \beta / W,

    with the old values on both right sides, c the center (the mean of the starts at
    first), W the number of workers, τ the `period`. The exchange conserves Σ y_i + c. The
    center, which `lsgd_jax.center` returns, is the model to test. With a Nesterov base
    optimizer this is EAMSGD. A single worker is the center itself.

    A worker whose y or loss is not finite is left out (its share of β stays with the
    center) and takes the center whole.

    Args:
      beta: the share of the way to the workers' mean that the center moves, β in [0, 1],
        or a schedule of t.
      period: steps between exchanges, τ, or `Periods`.
      order: 'combine_then_adapt' is the paper's form: x in place of y, and u is added last.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

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
    check_every("period", period)

    def alpha(t):
        return value_at(beta, t) / Group(axes).size

    rule = in_order(moving_center(alpha, axes=axes), order)
    return exchange(Pull(rule, alpha, every=period), **options)


@by_value
@takes_options()
def downpour(
    period: Period = 16,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""Synchronous DOWNPOUR: the center adds all workers' moves, and all take the center.

    With y = x + u the worker's parameters after its own step t = 1, 2, …, if t mod τ = 0:

    .. math::
      c \leftarrow c + \sum_i (y_i - c), \qquad y_i \leftarrow c,

    with c the center (the mean of the starts at first) and τ the `period`. c is where all
    workers stood after the last exchange, so the sum is over their moves since.
    The center, which `lsgd_jax.center` returns, is the model to test. A worker whose y or
    loss is not finite is left out and takes the center whole.

    Args:
      period: steps between exchanges, τ, or `Periods`.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain. The center is kept
      once, in float32 at least.

    Raises:
      ValueError: a period below 1.

    Reference: Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.01), lj.downpour(period=4))
    """
    check_every("period", period)
    rule = moving_center(1.0, renewed=True, axes=axes)
    return exchange(Pull(rule, 1.0, every=period), **options)
