"""Fragments of a pull: each with a state of its own, or all of them stacked in one.

Where layers are stacked and cut into equal runs, the step count tells which fragment acts,
so its index is an array of the program. One state and one program then serve all fragments.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lsgd_jax._src.exchange import kernel, parts
from lsgd_jax._src.exchange.kernel import Pull, PullState
from lsgd_jax._src.exchange.parts import LeafRun
from lsgd_jax._src.exchange.rule import silent
from lsgd_jax._src.trees import Tree


class PullStates(PullState):
    """The states of all fragments of a pull, stacked.

    Leaves like the part have the shape of all fragments together, which are runs of them.
    All other leaves have a leading axis of F, the number of fragments.
    """

    __slots__ = ()


class Slot(NamedTuple):
    """A place among the states of an exchange, and the pull whose state lies there.

    Attributes:
      pull: the pull; of one fragment, unless the fragments are stacked.
      number: by which phases name what the pull does. Fragments that share a program have
        one number.
      is_stacked: whether the states of all fragments lie there.
      shares: whether it is one of several slots of its number, so that the step count tells
        which of them acts.
    """

    pull: Pull
    number: int
    is_stacked: bool = False
    shares: bool = False

    def acting(self, index: Callable[[Any], Any], t: Array, params: Tree) -> "Acting":
        """Returns what acts at step t.

        index: of the pull's schedule: which fragment acts, such as `fragment_landing`.
        """
        if not self.is_stacked:
            return Acting(self.pull)
        fragment = index(t)
        return Acting(self.pull.fragment(fragment), fragment, _like(self.pull, params))


def slots_of(
    pulls: Sequence[Pull], states: Sequence[PullState] | None = None
) -> list[Slot]:
    """Returns the places of the states of these pulls, in order.

    states: those of an exchange. Without them fragments that share a program are stacked,
      as phases see them, which do not know the parameters.
    """
    found: list[Slot] = []
    number = 0
    for pull in pulls:
        if pull.fragments == 1:
            found.append(Slot(pull, number))
            number += 1
        elif not share_a_program(pull):
            found += [Slot(each, number + i) for i, each in enumerate(pull.each)]
            number += pull.fragments
        elif states is None or isinstance(states[len(found)], PullStates):
            found.append(Slot(pull, number, is_stacked=True))
            number += 1
        else:
            found += [Slot(each, number, shares=True) for each in pull.each]
            number += 1
    return found


def share_a_program(pull: Pull) -> bool:
    """Whether phases name the fragments of a pull alike, as far as that is known.

    Their leaves must be stacks of layers. Nothing may read the state between exchanges, and
    it must lie on the device.
    """
    is_idle = pull.rule.step is silent and pull.memory == "device"
    return is_idle and parts.cuts_all(pull.part, pull.scan_axis)


def init(pulls: Sequence[Pull], params: Tree) -> tuple[PullState, ...]:
    """Returns the states of the pulls before the first step."""
    states: list[PullState] = []
    for pull in pulls:
        if pull.fragments == 1:
            states.append(kernel.init(pull, params))
        elif share_a_program(pull) and _is_uniform(pull, params):
            states.append(_stacked(pull, params))
        else:
            states += [kernel.init(each, params) for each in pull.each]
    return tuple(states)


def _is_uniform(pull: Pull, params: Tree) -> bool:
    """Whether all fragments of these parameters, and their states, are alike."""
    count = pull.fragments
    first, *others = [parts.runs_of(each.part, params) for each in pull.each]
    for i, cut in enumerate(others, 1):
        if cut != [isinstance(run, LeafRun) and run.at(i) for run in first]:
            return False
    whole = jax.tree.leaves(_like(pull, params, fragment=None))
    one = jax.tree.leaves(_like(pull, params))
    return len(whole) == len(one) and all(_holds(x, y, count) for x, y in zip(whole, one))


def _stacked(pull: Pull, params: Tree) -> PullStates:
    """The states of all fragments before the first step."""
    together = kernel.init(pull.fragment(None), params)
    leaves, treedef = jax.tree.flatten(PullStates(*together))

    def held(x: Array, one: Any) -> Array:
        if x.shape != one.shape:
            return x
        return jnp.broadcast_to(x, (pull.fragments, *x.shape))

    states = treedef.unflatten(map(held, leaves, jax.tree.leaves(_like(pull, params))))
    return states._replace(traffic=states.traffic.of(*pull.schedule.message_steps(1)))


def _like(pull: Pull, params: Tree, fragment: int | None = 0) -> PullState:
    """The shapes of the state of one fragment, or of all of them together (None)."""
    return jax.eval_shape(lambda x: kernel.init(pull.fragment(fragment), x), params)


class Acting(NamedTuple):
    """The pull that acts at a step, and its place in a slot.

    Attributes:
      pull: the pull; its fragment may be an array.
      fragment: int32 scalar, or None for a pull that has the slot for itself.
      like: the shapes of its state, or None.
    """

    pull: Pull
    fragment: Array | None = None
    like: PullState | None = None

    def take(self, states: PullState) -> PullState:
        """Returns its state."""
        if self.fragment is None:
            return states
        leaves, treedef = jax.tree.flatten(PullState(*states))

        def take(x: Array, one: Any) -> Array:
            if x.ndim > one.ndim:
                return lax.dynamic_index_in_dim(x, self.fragment, keepdims=False)
            axis, size = _run(x, one)
            return lax.dynamic_slice_in_dim(x, self.fragment * size, size, axis)

        own = treedef.unflatten(map(take, leaves, jax.tree.leaves(self.like)))
        # Otherwise XLA fuses what is read with what is put back, and copies all fragments.
        name = "pending" if self.pull.delay else "rule"
        alone = jax.tree.map(lax.optimization_barrier, getattr(own, name))
        return own._replace(**{name: alone})

    def put(self, states: PullState, before: PullState, after: PullState) -> PullState:
        """Returns the states with its own after a step in place of that before it."""
        if self.fragment is None:
            return after
        leaves, treedef = jax.tree.flatten(states)

        def put(x: Array, old: Array, new: Array) -> Array:
            if new is old:
                return x
            if x.ndim > new.ndim:
                return lax.dynamic_update_index_in_dim(x, new, self.fragment, 0)
            axis, size = _run(x, new)
            return lax.dynamic_update_slice_in_dim(x, new, self.fragment * size, axis)

        pairs = jax.tree.leaves(before), jax.tree.leaves(after)
        return treedef.unflatten(map(put, leaves, *pairs))


def each_of(states: PullState, lead: int) -> list[PullState]:
    """Returns the states of each fragment, of which only the counters are taken apart.

    lead: the number of leading axes of leaves that are equal on all workers.
    """
    if not isinstance(states, PullStates):
        return [states]
    agreement = states.agreement and states.agreement._replace(target=())
    own = {
        "restored": states.restored,
        "dropped": states.dropped,
        "dropped_in_a_row": states.dropped_in_a_row,
        "missed": states.missed,
        "agreement": agreement,
    }
    is_host = isinstance(states.restored, np.ndarray)
    apart = _apart if is_host else jax.jit(_apart, static_argnums=2)
    plain = PullState(*states)
    return [
        plain._replace(traffic=traffic, **counters)
        for counters, traffic in apart(own, states.traffic, lead)
    ]


def _apart(own: Tree, shared: Tree, lead: int) -> list[Tree]:
    """The counters of each fragment; those of a worker have them along the last axis."""

    def of_worker(i: int) -> Tree:
        return jax.tree.map(lambda x: x[..., i], own)

    def of_all(i: int) -> Tree:
        return jax.tree.map(lambda x: x[(slice(None),) * lead + (i,)], shared)

    return [(of_worker(i), of_all(i)) for i in range(own["restored"].shape[-1])]


def _holds(x: Any, one: Any, count: int) -> bool:
    """Whether x, a leaf of the state of all fragments, holds runs of the shape of one."""
    cut = [(n, m) for n, m in zip(x.shape, one.shape) if n != m]
    return x.shape == one.shape or (
        len(cut) == 1 and x.ndim == one.ndim and cut[0][0] == count * cut[0][1]
    )


def _run(x: Any, one: Any) -> tuple[int, int]:
    """The axis along which a leaf of one fragment is a run of x, and its size."""
    sizes = enumerate(zip(x.shape, one.shape))
    return next((axis, n) for axis, (whole, n) in sizes if whole != n)
