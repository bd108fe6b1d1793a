"""The pulls of a due step, one after the other, on parameters packed into a few buffers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._src import parts, trees
from lsgd_jax._src.branch import cond
from lsgd_jax._src.collectives import Group
from lsgd_jax._src.movement import move, stay
from lsgd_jax._src.packing import Packing
from lsgd_jax._src.trees import Tree


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
      states: of each pull the state of its rule, what is pending, how often this worker
        was restored, and what is remembered of what was sent.
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
    state: tuple[Any, tuple, Array, Any],
    fit: Array,
    t: Array,
) -> tuple[list[Array], tuple[Any, tuple, Array, Any], Array]:
    """The packed u, the pull's state and whether this worker was restored."""
    pull, group = due.pull, due.group

    def send(u, states):
        rule_state, kept = states
        group.bytes_sent, group.kept = 0.0, kept  # this may be traced more than once
        y = view.tree(trees.plus(view.xs, u))
        z, found, rule_state = pull.rule.agree(
            group, view.tree(view.xs), y, rule_state, fit, t
        )
        return z, found, (rule_state, trees.where(found, group.kept, kept))

    def land(u, z, found):
        own = view.of(view.xs), view.of(u)
        z = view.packing.pack(z, view.owned)
        moved = iter(move(*own, z, pull.weight(t), found, fit))
        u = [next(moved) if b in view.owned else buffer for b, buffer in enumerate(u)]
        return u, found & ~fit

    def land_late(u, kept, z, found):
        u, restored = land(u, z, found)
        return u, restored, kept.without_error(restored) if kept else kept

    def send_and_land(u, states):
        z, found, states = send(u, states)
        return *land(u, z, found), states

    rule_state, pending, restored_before, kept = state
    not_restored = jnp.asarray(False)
    if pull.delay:
        stays = lambda u, kept, *_: (u, not_restored, kept)
        u, restored, kept = cond(due.lands, land_late, stays, u, kept, *pending)
        *pending, states = cond(
            due.sends,
            lambda u, pending, states: _widened(*send(u, states)),
            lambda u, pending, states: (*pending, states),
            u,
            tuple(pending),
            (rule_state, kept),
        )
    else:
        u, restored, states = cond(
            due.sends,
            send_and_land,
            lambda u, states: (u, not_restored, states),
            u,
            (rule_state, kept),
        )
    rule_state, kept = states
    after = (rule_state, tuple(pending), restored_before + restored, kept)
    return u, after, restored


def _widened(z: Tree, found: Array, state: Any) -> tuple[Tree, Array, Any]:
    return trees.widen(z), found, state
