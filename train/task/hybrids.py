"""Combinations of two methods, built from the public API of `lsgd_jax`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import lsgd_jax as lj


class LedState(NamedTuple):
    """The state of `led`: the election, and the anchor that follows the leader."""

    election: lj.LeaderState
    anchor: lj.AnchorState

    @property
    def leader(self) -> Array:
        """The leader at the last election, for `lj.diagnostics`."""
        return self.election.leader

    @property
    def score(self) -> Array:
        """The leader's score, for `lj.diagnostics`."""
        return self.election.score


def led(
    outer: optax.GradientTransformation,
    axes: tuple[str, ...] = ("node", "local"),
    window: int = 10,
) -> lj.Rule:
    r"""A rule whose anchor an outer optimizer moves towards the leader.

    .. math:: \Delta = a - y_l, \qquad a \leftarrow a + \text{outer}(\Delta), \qquad z = a

    where l is the leader. It is `lj.anchored` with the leader's parameters in place of the
    mean.

    Args:
      outer: any optax transformation.
      axes: the mesh axes of the group.
      window: number of losses whose mean is the score.
    """
    outer = optax.with_extra_args_support(outer)
    leader, anchored = lj.leader(axes, window), lj.anchored(outer, axes)

    def init(params: Any) -> LedState:
        return LedState(leader.init(params), anchored.init(params))

    def step(u, x, state, loss, t):
        u, election, fit = leader.step(u, x, state.election, loss, t)
        return u, state._replace(election=election), fit

    def agree(group, x, y, state, fit, t):
        best, found, election = leader.agree(group, x, y, state.election, fit, t)
        before = state.anchor.anchor.value, state.anchor.outer.value
        pseudo_gradient = jax.tree.map(jnp.subtract, before[0], best)
        move, moved = outer.update(pseudo_gradient, before[1], before[0])
        after = optax.apply_updates(before[0], move), moved
        chosen = jax.tree.map(lambda new, old: jnp.where(found, new, old), after, before)
        anchor = lj.AnchorState(*map(group.shared, chosen))
        return chosen[0], jnp.asarray(True), LedState(election, anchor)

    return lj.Rule(axes, init, agree, step)


def diloco_leader(
    period: int = 64,
    outer: optax.GradientTransformation | None = None,
    loss_window: int = 10,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo with a leader: the outer step follows the best worker instead of the mean.

    Args:
      period: steps between exchanges.
      outer: any optax transformation. Defaults to that of `lj.diloco`.
      loss_window: number of recent losses whose mean elects the leader.
    """
    if outer is None:
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return lj.exchange(lj.Pull(led(outer, window=loss_window), 1.0, every=period))


def lsgd_diloco(
    local_pull: float = 0.1,
    local_period: int = 16,
    period: int = 64,
    outer: optax.GradientTransformation | None = None,
    loss_window: int = 10,
) -> optax.GradientTransformationExtraArgs:
    """LSGD inside a node, and DiLoCo across nodes among workers with the same local index.

    Args:
      local_pull: pull towards the leader of the node, in [0, 1].
      local_period: steps between pulls towards the node's leader.
      period: steps between exchanges across nodes.
      outer: any optax transformation. Defaults to that of `lj.diloco`.
      loss_window: number of recent losses whose mean elects the leader.
    """
    inside: Any = lj.lsgd(local_pull, 0.0, local_period, loss_window=loss_window)
    across: Any = lj.diloco(period, outer, axes="node")
    return lj.exchange(inside, across)
