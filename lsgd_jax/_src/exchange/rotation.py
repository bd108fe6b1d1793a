"""Rotations: fragments of equal shapes that take turns, with one state and one program.

The step count tells which fragment is due, so its index is an array of the program, and
one program serves all fragments.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lsgd_jax._src.by_value import are_equal
from lsgd_jax._src.exchange import kernel, parts
from lsgd_jax._src.exchange.kernel import Pull, PullState
from lsgd_jax._src.exchange.parts import Fragment, Run
from lsgd_jax._src.exchange.rule import silent
from lsgd_jax._src.trees import Tree


class PullStates(PullState):
    """The states of the pulls of a `Rotation`.

    Leaves like the part have the shape of all fragments together, which are runs of them.
    All other leaves have a leading axis of F, the number of fragments.
    """

    __slots__ = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Rotation(Pull):
    """The pulls of all fragments of a part as one pull.

    Attributes:
      offset: int32 [F], the offset of each fragment; so are `agrees_at` and `sends_at`.
      part: the first fragment.
    """

    part: Any = None

    def __post_init__(self):
        pass  # its pulls are checked

    @classmethod
    def of(cls, pulls: Sequence[Pull]) -> "Rotation":
        """Returns the rotation of pulls in the order of their fragments."""
        offset: Any = np.array([pull.offset for pull in pulls], np.int32)
        return cls(**vars(pulls[0]) | {"offset": offset})

    def pull(self, fragment: Any) -> Pull:
        """The pull of a fragment, whose index may be an array, at an offset of 0.

        fragment: None stands for all of them together.
        """
        whole = self.part.part
        part = whole if fragment is None else self.part._replace(index=fragment)
        return Pull(**vars(self) | {"offset": 0, "part": part})

    def is_uniform(self, params: Tree) -> bool:
        """Whether all fragments of these parameters, and their states, are alike."""
        cut = lambda i: parts.runs_of(self.part._replace(index=i), params)
        first, count = cut(0), self.part.count
        alike = lambda i: [isinstance(run, Run) and run.at(i) for run in first]
        if not all(cut(i) == alike(i) for i in range(count)):
            return False
        whole = jax.tree.leaves(self.like(params, fragment=None))
        each = zip(whole, one := jax.tree.leaves(self.like(params)))
        return len(whole) == len(one) and all(_holds(x, y, count) for x, y in each)

    def init(self, params: Tree) -> PullStates:
        """Returns the states before the first step."""
        together = kernel.init(self.pull(None), params)
        leaves, treedef = jax.tree.flatten(PullStates(*together))
        count = self.part.count

        def held(x: Array, one: Any) -> Array:
            return x if x.shape != one.shape else jnp.broadcast_to(x, (count, *x.shape))

        states = treedef.unflatten(map(held, leaves, jax.tree.leaves(self.like(params))))
        return states._replace(traffic=states.traffic.of(self.every, self.sends_at))

    def like(self, params: Tree, fragment: int | None = 0) -> PullState:
        """The shapes of the state of one fragment, or of all of them together (None)."""
        return jax.eval_shape(lambda x: kernel.init(self.pull(fragment), x), params)


class InTurn(NamedTuple):
    """The pull that acts, and its place among the states.

    Attributes:
      pull: the pull; its fragment may be an array.
      fragment: int32 scalar, or None for a pull that has a state of its own.
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


def turn_of(pull: Pull, at: Any, t: Array, params: Tree) -> InTurn:
    """Returns the pull itself, or that of the fragment of a rotation that is due.

    at: the step of the period at which each fragment is due, such as `sends_at`.
    """
    if not isinstance(pull, Rotation):
        return InTurn(pull)
    fragment = jnp.argmax(t % pull.every == at).astype(jnp.int32)
    return InTurn(pull.pull(fragment), fragment, pull.like(params))


def each_of(states: PullState, lead: int) -> list[PullState]:
    """Returns the states of each pull, of which only the counters are taken apart.

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
    last = lambda i: jax.tree.map(lambda x: x[..., i], own)
    of = lambda i: jax.tree.map(lambda x: x[(slice(None),) * lead + (i,)], shared)
    return [(last(i), of(i)) for i in range(own["restored"].shape[-1])]


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


# Rotations among the pulls. Phases must know them without the parameters.


class Pulls(tuple[Pull, ...]):
    """The pulls of an exchange, in order."""

    @functools.cached_property
    def firsts(self) -> list[int]:
        """For each pull the index of the first one of its rotation, or its own.

        A rotation is a pull for each fragment of stacks of layers, one after the other, at
        offsets of their own. They differ in nothing else. The rule does nothing on other
        steps, and the state lies on the device.
        """
        found: list[int] = []
        while (k := len(found)) < len(self):
            found += [k] * _length(self[k:])
        return found

    def slots(self, is_one: Callable[[int, Rotation], bool]) -> dict[int, Pull]:
        """Returns the pulls by index, with rotations at the index of their first pull.

        is_one: whether a rotation has one state, given the position of that state.
        """
        found: dict[int, Pull] = {}
        for k, group in itertools.groupby(enumerate(self.firsts), lambda pair: pair[1]):
            members = [self[i] for i, _ in group]
            if len(members) > 1 and is_one(len(found), whole := Rotation.of(members)):
                found[k] = whole
            else:
                found |= enumerate(members, k)
        return found

    def init(self, params: Tree) -> tuple[PullState, ...]:
        """Returns the states of the pulls and rotations before the first step."""

        def start(pull: Pull) -> PullState:
            is_one = isinstance(pull, Rotation)
            return pull.init(params) if is_one else kernel.init(pull, params)

        each = self.slots(lambda _, rotation: rotation.is_uniform(params))
        return tuple(map(start, each.values()))


def _length(pulls: Sequence[Pull]) -> int:
    """How many pulls at the beginning are a rotation, or 1."""
    first = pulls[0]
    if not isinstance(first.part, Fragment) or not parts.cuts_all(first.part):
        return 1
    turns = pulls[: first.part.count]
    is_idle = first.rule.step is silent and first.memory == "device"
    is_whole = len({pull.offset for pull in turns}) == first.part.count
    alike = all(_is_turn(i, pull, first) for i, pull in enumerate(turns))
    return len(turns) if is_idle and is_whole and alike else 1


def _is_turn(i: int, pull: Pull, first: Pull) -> bool:
    """Whether a pull is the i-th one of the rotation that begins with the first."""
    fragment: Any = first.part
    part = fragment._replace(index=i)
    same = lambda a, b: a is b or (not isinstance(a, jax.core.Tracer) and are_equal(a, b))
    mine, expected = vars(pull), vars(first) | {"offset": pull.offset, "part": part}
    return all(same(mine[name], expected[name]) for name in mine)
