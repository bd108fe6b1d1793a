"""A worker's own step, to which the pulls of an exchange are added, in the forms it has.

Chained      x and the update u of the optimizers before; y = x + u: in a chain
Remembered   y of a training step, and the x before it; u = y - x: in an `outer`
Alone        y alone; the rules' own steps start from x = y and u = 0: in an `outer`
             whose rules do not depend on x
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.exchange import kernel
from lsgd_jax._src.exchange.kernel import Check, Pull, PullState
from lsgd_jax._src.exchange.rule import NO_EXTRAS, Extras
from lsgd_jax._src.trees import Tree


Counts = tuple[Array, ...]  # bool scalars


class Before(NamedTuple):
    """All that an own step reads besides the parameters.

    Attributes:
      pulls: the pulls.
      states: their states.
      is_finite: bool scalar, False for a worker that waits to be restored.
      t: int32 scalar, the step.
      loss: the loss of the step, or None.
      extras: further arguments of `update`, for rules that read them.
    """

    pulls: Sequence[Pull]
    states: Sequence[PullState]
    is_finite: Array
    t: Array
    loss: Any
    extras: Extras = NO_EXTRAS


class Stepped(NamedTuple):
    """A worker after its own step.

    Attributes:
      x: the leaves of floats before the step, for the rules that read them.
      u: an update of x, or y itself.
      is_update: which of the two u is.
      states: the pulls' states.
      counts: for each pull, whether loss and rule let this worker take part.
      is_finite: bool scalar, whether the worker is finite as far as it was checked.
      adds: whether pulls move the worker by updates of x, as in a chain, so that x + u is
        rounded. If u is y itself, its chain has added the update already.
    """

    x: Tree
    u: Tree
    is_update: bool
    states: tuple[PullState, ...]
    counts: Counts
    is_finite: Array
    adds: bool = False


class Chained(NamedTuple):
    """The own step is an update.

    Attributes:
      x: the leaves of floats before it.
      u: the update, in float32 or wider.
      check: see `exchange`.
    """

    x: Tree
    u: Tree
    check: Check

    def stepped(self, before: Before) -> Stepped:
        """Returns the worker after the rules' own steps."""
        u, states, counts, is_finite = kernel.local(
            before.pulls,
            self.x,
            self.u,
            before.loss,
            before.states,
            before.is_finite,
            before.t,
            self.check,
            before.extras,
        )
        return Stepped(self.x, u, True, states, counts, is_finite, adds=True)


class Remembered(NamedTuple):
    """The own step has returned new parameters, and those before it are known.

    Attributes:
      x: the leaves of floats before the step.
      y: those after it.
      check: see `exchange`.
    """

    x: Tree
    y: Tree
    check: Check

    def stepped(self, before: Before) -> Stepped:
        """Returns the worker after the rules' own steps, which are those in a chain."""

        def gap(x: Array, y: Array) -> Array:
            # Where x is not finite, `apply_updates` uses u as the parameter itself.
            return trees.widened(y) - trees.finite_part(trees.widened(x))

        u = jax.tree.map(gap, self.x, self.y)
        after = Chained(self.x, u, self.check).stepped(before)

        def keep(y: Array, z: Array, u: Array, moved: Array) -> Array:
            # x + (y - x) may round to a neighbor of y.
            return jnp.where((u == moved) & jnp.isfinite(y), y, z)

        moved = trees.apply_updates(self.x, after.u)
        y = jax.tree.map(keep, self.y, moved, u, after.u)
        return after._replace(u=y, is_update=False, adds=False)


class Alone(NamedTuple):
    """The own step has returned new parameters; those before it are lost.

    Without them the step of a worker that is not finite cannot be undone.

    Attributes:
      y: the leaves of floats after the step.
    """

    y: Tree

    @property
    def x(self) -> Tree:
        """Stands for the parameters before the step, on which no rule depends."""
        return self.y

    def stepped(self, before: Before) -> Stepped:
        """Returns the worker after the rules' own steps."""
        still = trees.zeros(self.y)
        u, states, counts = kernel.step_rules(
            before.pulls,
            self.y,
            still,
            before.loss,
            before.states,
            before.t,
            before.extras,
        )
        # y + 0 may have other bits than y: -0.0 becomes 0.0.
        y = self.y if trees.is_same(u, still) else trees.plus(self.y, u)
        return Stepped(y, y, False, states, counts, before.is_finite)


OwnStep = Chained | Remembered | Alone
