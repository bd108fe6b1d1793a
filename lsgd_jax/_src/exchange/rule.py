"""Rule: the target of a pull, and the parameters at which it is computed."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import ByValue, by_value
from lsgd_jax._src.checks import check_axes, check_option
from lsgd_jax._src.moved import renamed_argument
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.trees import Tree, widened
from lsgd_jax._src.wire.group import Group


def fits_in_sums(group: Group, y: Tree, state: Any) -> Any:
    """Whether sums of such y over the group are far from overflow: a bool scalar.

    With :math:`|y| \\le` `largest` / (256 W) no sum over the W workers overflows.
    """
    del state
    if group.size == 1:
        return True
    return trees.has_headroom(jax.tree.map(lambda y: group.size * widened(y), y))


def always(group: Group, y: Tree, state: Any) -> Any:
    """The `Rule.summable` of a rule that adds up nothing."""
    del group, y, state
    return True


Order = Literal["adapt_then_combine", "combine_then_adapt"]
Kept = Literal["reference", "error"]
Read = Literal["grad"]


class Extras(NamedTuple):
    """Arguments of `update` for the rules that read them.

    Attributes:
      grad: the worker's gradient at x, a tree like x, or None; per worker.
    """

    grad: Tree | None = None


NO_EXTRAS = Extras()


def silent(u: Tree, x: Tree, state: Any, loss: Array | None, t: Array) -> Any:
    """The `Rule.step` of a rule that does nothing between its exchanges."""
    del x, loss, t
    return u, state, True


@dataclasses.dataclass(frozen=True, eq=False)
class Rule(ByValue):
    """The target of a pull: three pure functions for one worker, and their group.

    x are the worker's parameters, u its update, y = x + u (after the pulls before this
    one), t = 1, 2, … the step, loss the worker's loss at x or None.

    Attributes:
      axes: the mesh axes of the group.
      init: params -> state.
      agree: (group, x, y, state, takes_part, t) -> (z, found, state), called on due steps.
        It is the only function that communicates, through `group`. takes_part: bool scalar,
        whether this worker's loss, its y and the result of `step` are finite.
        z: the target, a tree like y. found: bool scalar, whether there is a target. If z
        or the state is not finite, the exchange is dropped and the state stays as it was.
      step: (u, x, state, loss, t) -> (u, state, takes_part), called on every step; never
        communicates.
      keeps: the memory that `agree` needs for a narrow wire format: 'reference', the last
        target, if it calls `broadcast`, or `masked_mean` without a reference of its own;
        'error' if it calls `masked_mean` or `masked_sum`; () if it only permutes and
        pushes. With None, parameters travel in float32 only.
      reads: the further arguments of `update` that it takes. With 'grad' `step` gets
        ``grad=``, the worker's gradient: a tree like x, or None if `update` was called
        without one.
      is_common: whether z is bit-identical on all workers of the group, and not part of a
        `Shared` in the state. `verify` then compares it, see `Pull`.
      rounds: W -> for each of its exchanges in order the round of its graph, after which it
        starts over; () if no program depends on the round. With the sizes of the axes a
        phase names the round, see `Group.round_of`. Defaults to a rule without rounds.
      summable: (group, y, state) -> bool scalar, with the state of the pull: whether the
        values of this worker can be added up. If not, the worker counts as not finite: it
        does not take part and takes the target whole. Defaults to a test that y leaves
        headroom for a sum over the group.
      commits: whether `agree` itself leaves what is `Shared` in its state as it was, and
        finds no target, if the result is not finite or `group.is_sound` does not hold. By
        default the kernel does so, and both versions are alive until all is tested.
      steps_apart: whether `step` reads nothing that `agree` changes. Steps may then go on
        while messages travel beside them, see `Workers.loop`.
      reads_x: whether the target or `step` depends on x, the parameters before the worker's
        own step, and not only on y. `outer` then keeps a copy of x.

    Raises:
      ValueError: axes that are no names.
    """

    axes: Axes
    init: Callable[[Tree], Any]
    agree: Callable[[Group, Tree, Tree, Any, Array, Array], tuple[Tree, Array, Any]]
    step: Callable[..., tuple[Tree, Any, Any]] = silent
    keeps: tuple[Kept, ...] | None = None
    reads_x: bool = True
    reads: tuple[Read, ...] = ()
    is_common: bool = False
    summable: Callable[[Group, Tree, Any], Any] = fits_in_sums
    commits: bool = False
    steps_apart: bool = False
    rounds: Callable[[int], tuple[int, ...]] = lambda size: ()

    def __post_init__(self):
        check_axes(self.axes)


Rule.__init__ = renamed_argument(turns="rounds")(Rule.__init__)


@by_value
def combine_then_adapt(rule: Rule) -> Rule:
    """Returns the rule computed at x, with the step y - x added: z + (y - x)."""

    def agree(group, x, y, state, takes_part, t):
        z, found, state = rule.agree(group, x, x, state, takes_part, t)

        def add_step(z, x, y):
            wide = trees.widened(z)
            step = trees.widened(y) - trees.widened(x)
            return wide + jnp.where(takes_part, step.astype(wide.dtype), 0)

        return jax.tree.map(add_step, z, x, y), found, state

    return dataclasses.replace(rule, agree=agree, reads_x=True, is_common=False)


def in_order(rule: Rule, order: Order) -> Rule:
    """Returns the rule as it is, or computed at x, as `order` says."""
    check_option("order", order, get_args(Order))
    return combine_then_adapt(rule) if order == "combine_then_adapt" else rule
