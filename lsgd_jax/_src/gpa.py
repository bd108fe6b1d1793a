"""GPA: gradients are taken between an average of the iterates and the newest of them."""

from typing import Any, NamedTuple

import jax
import optax

from lsgd_jax._src import trees
from lsgd_jax._src.checks import check_fraction
from lsgd_jax._src.trees import Tree


class GPAState(NamedTuple):
    """The state of `gpa`.

    Attributes:
      base: the state of the base optimizer.
      offset: o = x - y, the average minus the parameters of the training loop: a tree like
        the parameters, in float32 or wider.
    """

    base: Any
    offset: Tree


def gpa(
    base: optax.GradientTransformation, mu_y: float = 0.7, mu_x: float = 0.9967
) -> optax.GradientTransformationExtraArgs:
    r"""Generalized primal averaging: the base optimizer moves z, and x averages all z.

    The parameters of the training loop are y, where gradients are computed:

    .. math::
      z \leftarrow z + \hat u, \qquad
      x \leftarrow \mu_x x + (1 - \mu_x) z, \qquad
      y \leftarrow \mu_y x + (1 - \mu_y) z

    with :math:`\hat u` the base optimizer's update for the gradient at y. All three start
    equal. x is the model to test, see `gpa_average`. Only o = x - y is kept:

    .. math::
      o' = \mu_x \, (o - (1 - \mu_y) \, \hat u), \qquad
      u = \hat u + \frac{\mu_y}{1 - \mu_y} (o' - o).

    It communicates nothing, so it is for one worker, or stands before a method that pulls.
    A pull of y moves x and z alike. An update that is not finite would stay in o, so put
    ``optax.apply_if_finite`` around `gpa` and not around `base`.

    Args:
      base: the optimizer that moves z. Its weight decay sees y.
      mu_y: the share of x in y, in [0, 1).
      mu_x: the share of x that stays at each step, in [0, 1]. With 0, x, y and z are equal,
        and the base optimizer is unchanged.

    Returns:
      An optax transformation in place of `base`. Its updates are in float32 or wider.

    Raises:
      ValueError: `mu_y` or `mu_x` outside [0, 1], or `mu_y` of 1.

    Reference: arXiv:2512.17131; the defaults are those of the released code.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(lj.gpa(optax.adamw(1e-3)), lj.local_sgd(period=16))
    """
    check_fraction("mu_y", mu_y)
    check_fraction("mu_x", mu_x)
    if mu_y == 1:
        raise ValueError(f"`mu_y` must be less than 1, or y never moves to z, got {mu_y=}")
    base = optax.with_extra_args_support(base)
    ratio = mu_y / (1 - mu_y)

    def init(params: Tree) -> GPAState:
        return GPAState(base.init(params), trees.zeros(trees.floats(params)))

    def update(updates, state, params=None, **extra_args):
        steps, of_base = base.update(updates, state.base, params, **extra_args)
        u = trees.widen(trees.floats(steps))
        before = state.offset
        after = jax.tree.map(lambda o, u: mu_x * (o - (1 - mu_y) * u), before, u)
        u = jax.tree.map(lambda u, new, old: u + ratio * (new - old), u, after, before)
        return trees.refill(u, steps), GPAState(of_base, after)

    return optax.GradientTransformationExtraArgs(init, update)


def gpa_average(state: Any, params: Tree) -> Tree:
    """Returns x = y + o, the model of `gpa` to test, for one worker or for rows of workers.

    Args:
      state: an optax state that contains the state of one `gpa`.
      params: y, the parameters of the training loop.

    Returns:
      A tree like `params`, of the same dtypes.

    Raises:
      ValueError: a state without a `GPAState`.

    >>> import jax.numpy as jnp, optax, lsgd_jax as lj
    >>> tx = lj.gpa(optax.sgd(1.0))
    >>> u, state = tx.update(jnp.float32(1), tx.init(jnp.float32(0)))
    >>> y = optax.apply_updates(jnp.float32(0), u)
    >>> round(float(lj.gpa_average(state, y)), 4)
    -0.0033
    """
    offset = optax.tree.get(state, "offset", filtering=_is_gpa)
    if offset is None:
        raise ValueError(f"`state` must contain the state of `gpa`, got {type(state)}")
    moved = trees.apply_updates(trees.floats(params), offset)
    return trees.refill(moved, params)


def _is_gpa(path: Any, value: Any) -> bool:
    """Whether a field that `optax.tree.get` found belongs to a `GPAState`."""
    del value
    return isinstance(path[-1], optax.tree_utils.NamedTupleKey) and (
        path[-1].tuple_name == "GPAState"
    )
