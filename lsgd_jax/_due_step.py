"""The pulls of a due step, one after the other, on parameters packed into a few buffers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax import parts, trees
from lsgd_jax._branch import cond
from lsgd_jax._movement import move, stay
from lsgd_jax.collectives import Group
from lsgd_jax.packing import Packing
from lsgd_jax.trees import Tree


class Due(NamedTuple):
    """One pull at a step, where it may be due: a `Pull` and what is known of it there.

    Attributes:
      pull: the pull.
      group: whom it speaks to; counts the bytes that it sends.
      sends, lands: bool scalars, whether the group agrees on a target now, and whether y is
        pulled now; the same on all workers.
      fit: bool scalar, whether this worker may count, its y aside.
    """

    pull: Any
    group: Group
    sends: Any
    lands: Any
    fit: Array


class View(NamedTuple):
    """What a pull sees of the packed parameters: the buffers and the tree of its part."""

    packing: Packing
    owned: list[int]
    xs: list[Array]

    def of(self, buffers: list[Array]) -> list[Array]:
        """Those of the buffers that are of its part."""
        return [buffers[b] for b in self.owned]

    def tree(self, buffers: list[Array]) -> Tree:
        """The leaves of its part."""
        return self.packing.unpack(self.of(buffers), self.owned)


def communicate(
    dues: Sequence[Due], x: Tree, u: Tree, states: Sequence[Any], healthy: Array, t: Array
) -> tuple[Tree, tuple, Array]:
    """u, the pulls' states and whether this worker is healthy, after what is due.

    Args:
      dues: the pulls, in order.
      x, u: the worker's parameters and update.
      states: of each pull the state of its rule, what is pending, and how often this worker
        was restored.
      healthy: bool scalar, False for a worker that is known to be sick.
      t: int32 scalar, the step.
    """
    packing, owned = _pack_by_part([due.pull.part for due in dues], x)
    xs, u, after = packing.pack(x), packing.pack(u), []
    is_finite = lambda u: trees.all_finite(packing.named(trees.plus(xs, u)))
    healthy &= is_finite(u)
    for due, buffers, state in zip(dues, owned, states):
        view = View(packing, buffers, xs)
        u, state, restored = _pull(due, view, u, state, due.fit & healthy, t)
        # A part that was restored does not restore the rest.
        whole = due.pull.part is None
        healthy |= restored if whole else is_finite(u)
        after.append(state)
    return packing.unpack(stay(xs, u), t=t), tuple(after), healthy


def _pack_by_part(
    taken: Sequence[parts.Part | None], x: Tree
) -> tuple[Packing, list[list[int]]]:
    """A packing whose buffers are of the same parts throughout; each part's buffers."""
    treedef = jax.tree.structure(x)
    leaves = [treedef.flatten_up_to(parts.select(part, x)) for part in taken]
    inside = lambda leaf: not isinstance(leaf, optax.MaskedNode)
    groups = [tuple(map(inside, leaf)) for leaf in zip(*leaves)]
    packing = Packing(x, groups)
    group_of = [groups[members[0]] for members in packing.members]
    owned = [[b for b, group in enumerate(group_of) if group[k]] for k in range(len(taken))]
    return packing, owned


def _pull(
    due: Due,
    view: View,
    u: list[Array],
    state: tuple[Any, tuple, Array],
    fit: Array,
    t: Array,
) -> tuple[list[Array], tuple[Any, tuple, Array], Array]:
    """The packed u, the pull's state and whether this worker was restored."""
    pull, group = due.pull, due.group

    def send(u, rule_state):
        group.bytes_sent = 0.0  # this may be traced more than once
        y = view.tree(trees.plus(view.xs, u))
        return pull.rule.agree(group, view.tree(view.xs), y, rule_state, fit, t)

    def land(u, z, found):
        own = view.of(view.xs), view.of(u)
        z = view.packing.pack(z, view.owned)
        moved = iter(move(*own, z, pull.weight(t), found, fit))
        u = [next(moved) if b in view.owned else buffer for b, buffer in enumerate(u)]
        return u, found & ~fit

    def send_and_land(u, rule_state):
        z, found, rule_state = send(u, rule_state)
        return *land(u, z, found), rule_state

    rule_state, pending, restored_before = state
    not_restored = jnp.asarray(False)
    if pull.delay:
        u, restored = cond(due.lands, land, lambda u, *_: (u, not_restored), u, *pending)
        *pending, rule_state = cond(
            due.sends,
            lambda u, pending, state: _widened(*send(u, state)),
            lambda u, pending, state: (*pending, state),
            u,
            tuple(pending),
            rule_state,
        )
    else:
        u, restored, rule_state = cond(
            due.sends,
            send_and_land,
            lambda u, state: (u, not_restored, state),
            u,
            rule_state,
        )
    return u, (rule_state, tuple(pending), restored_before + restored), restored


def _widened(z: Tree, found: Array, state: Any) -> tuple[Tree, Array, Any]:
    return trees.widen(z), found, state
