"""The kernel's pulls on a budget of steps: a worker's own steps, and where all meet.

An exchange does two things at a step: what needs no other worker, and what does. Here they
are two functions, so that workers may take steps by themselves, each as many as it can,
and meet when together they have taken as many as a period has.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.due_step import Due, communicate
from lsgd_jax._src.exchange import (
    Exchange,
    ExchangeState,
    Pull,
    group_of,
    is_sound,
    step_rules,
)
from lsgd_jax._src.movement import settle
from lsgd_jax._src.placement import misplaced, sample, sample_after
from lsgd_jax._src.shared import Shared
from lsgd_jax._src.trees import Tree, apply_updates


class BudgetState(NamedTuple):
    """The state of `on_budget`.

    Attributes:
      exchange: as in lock step; its count is that of the steps per worker in all rounds.
      fits: of each pull whether the worker may count in it: bool scalars, per worker.
      taken: int32 scalar, steps that this worker has taken itself; per worker.
    """

    exchange: ExchangeState
    fits: tuple[Array, ...]
    taken: Array


class OnBudget(optax.GradientTransformationExtraArgs):
    """What `on_budget` returns: an optax transformation that knows how workers meet."""

    pulls: tuple[Pull, ...] = ()

    @property
    def period(self) -> int:
        """Steps per worker between two meetings."""
        return math.gcd(*(pull.every for pull in self.pulls))

    def meet(
        self, params: Tree, opt_state: Any, step: int, t: Shared[Array]
    ) -> tuple[Tree, Any]:
        """One worker's parameters and state after the pulls that are due at a meeting.

        Args:
          params: the parameters after the last step.
          opt_state: the state of the chain that this stands in.
          step: steps per worker so far; says which pulls are due.
          t: the same, as an array.
        """
        due = [step % pull.every == 0 for pull in self.pulls]
        mine = lambda node: isinstance(node, BudgetState)
        leaves, treedef = jax.tree.flatten(opt_state, is_leaf=mine)
        for i, leaf in enumerate(leaves):
            if mine(leaf):
                params, leaves[i] = _meet(self.pulls, due, params, leaf, t.value)
        return params, treedef.unflatten(leaves)


def on_budget(exchange: Exchange) -> OnBudget:
    """An exchange among workers that share a budget of steps, as blocking LSGD has it.

    As a transformation, the last one of its chain, it does what an exchange does on steps
    where nothing is due. `OnBudget.meet` is the rest: `Rounds` calls it on all workers when
    they have used up the budget. With equal speeds the two make what the exchange does.
    Pulls start from where the last step has led, whatever their order is.

    Args:
      exchange: a method of the kernel that pulls, such as ``lsgd(...)``.

    Raises:
      ValueError: no exchange, or an offset or a delay: what a meeting sends lands there.

    Reference: Teng et al., NeurIPS 2019, section 4 and the released code.

    >>> import lsgd_jax as lj
    >>> on_budget(lj.lsgd(local_period=16, global_period=64)).period
    16
    """
    if not isinstance(exchange, Exchange) or not exchange.pulls:
        raise ValueError(
            "`exchange` must be a method that pulls, such as lsgd(...) with a pull above "
            f"0, got {exchange!r}"
        )
    for pull in exchange.pulls:
        if pull.offset or pull.delay:
            raise ValueError(
                "pulls on a budget must have no offset and no delay, got "
                f"offset={pull.offset}, delay={pull.delay}"
            )
    pulls, begin = exchange.pulls, exchange.init

    def init(params: Tree) -> Any:
        fits = tuple(jnp.asarray(True) for _ in pulls)
        begun: Any = begin(params)
        return BudgetState(begun, fits, jnp.int32(0))

    def update(updates, state, params=None, *, value=None, **extra_args) -> Any:
        del extra_args
        if params is None:
            raise ValueError("`update` needs the parameters, got params=None")
        before, taken = state.exchange, state.taken + 1
        u, stepped, fits = step_rules(
            pulls, trees.widen(updates), params, before.pulls, value, taken
        )
        sound = is_sound(value)
        u = settle(params, u, sound, before.sick)
        after = before._replace(
            misplaced=before.misplaced + misplaced(before.expected, params),
            expected=sample_after(params, u),
            pulls=tuple(
                pull._replace(rule=rule, restored=restored, wire=wire)
                for pull, (rule, _, restored, wire) in zip(before.pulls, stepped)
            ),
        )
        return u, BudgetState(after, tuple(sound & fit for fit in fits), taken)

    transformation = OnBudget(init, update)
    transformation.pulls = pulls
    return transformation


def _meet(
    pulls: Sequence[Pull], due: Sequence[bool], x: Tree, state: BudgetState, t: Array
) -> tuple[Tree, BudgetState]:
    """The parameters and the state after the pulls that are due."""
    before, chosen = state.exchange, [k for k, is_due in enumerate(due) if is_due]
    if not chosen:
        return x, state._replace(exchange=before._replace(count=Shared(t)))
    after, true = list(before.pulls), jnp.asarray(True)
    # 0, and nan where x is not finite, so that it stays so without a target.
    still = settle(x, jax.tree.map(jnp.zeros_like, trees.widen(x)), true, ~true)
    dues = [Due(pulls[k], group_of(pulls[k], t), True, True, state.fits[k]) for k in chosen]
    pulled = [before.pulls[k] for k in chosen]
    states = [(pull.rule, pull.pending, pull.restored, pull.wire) for pull in pulled]
    u, states, healthy = communicate(dues, x, still, states, ~before.sick, t)
    for k, due_here, (rule, pending, restored, wire) in zip(chosen, dues, states):
        pull = due_here.pull
        sent = before.pulls[k].traffic.add(
            due_here.group.bytes_sent, True, pull.every, pull.sends_at
        )
        after[k] = before.pulls[k]._replace(
            rule=rule, pending=pending, restored=restored, traffic=sent, wire=wire
        )
    x = apply_updates(x, u)
    moved = before._replace(
        count=Shared(t), sick=~healthy, expected=sample(x), pulls=tuple(after)
    )
    return x, state._replace(exchange=moved)
