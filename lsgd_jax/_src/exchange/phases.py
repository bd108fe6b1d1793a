"""Phases: which pulls send and land at a step, known while tracing or from the count.

A loop that counts its steps on the host knows what is due. A step that is compiled for one
phase has no conditional, so XLA can run its collectives beside the gradient. A permutation
is part of a program, so on a graph that changes with the exchange a phase also names the
round, if it is told the sizes of the axes: then a program holds one round, not all of them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from lsgd_jax._src.exchange.branch import any_of, is_due
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.parts import Fragment
from lsgd_jax._src.exchange.rotation import Pulls, Rotation
from lsgd_jax._src.shared import WORKER_AXES
from lsgd_jax._src.wire.group import Group


Sizes = Mapping[str, int]  # of the axes of the workers


class Phase(NamedTuple):
    """The pulls of a method that act at a step, by their indices; hashable.

    Where `scan_axis` is an axis of all leaves of a part, its first fragment stands for all,
    and the step count tells which of them it is. If they are not of equal shapes, the
    program branches on it.

    Attributes:
      sends: the pulls that communicate: those with a delay at the start of the step, about
        the parameters of the step before; all others at its end.
      lands: the pulls that move the parameters, at the end of the step.
      records: the pulls with a delay that keep the parameters, which they send at the start
        of the next step.
      rounds: for each pull in `sends` the round of its graph, or None if the program does
        not depend on it or the step count decides; () if that is so for all.
    """

    sends: tuple[int, ...] = ()
    lands: tuple[int, ...] = ()
    records: tuple[int, ...] = ()
    rounds: tuple[int | None, ...] = ()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is sent."""
        return not self.sends

    def __str__(self) -> str:
        """The phase in words: 'send 0, land 0', or 'quiet'."""
        known = tuple(r for r in self.rounds if r is not None)
        acts = zip(("send", "land", "record", "round"), (*self[:3], known))
        words = [f"{act} {'+'.join(map(str, who))}" for act, who in acts if who]
        return ", ".join(words) or "quiet"


QUIET = Phase()


class Turn(NamedTuple):
    """Whether one pull sends, lands and records at a step: bools, or arrays of bool.

    `round` is that of its graph, or None if the exchange is to find it.
    """

    sends: Any
    lands: Any
    records: Any
    round: Any = None

    @property
    def arrives(self) -> Any:
        """Whether the pull does anything after the worker's own step."""
        return any_of(self.lands, self.records)

    @classmethod
    def at(cls, pull: Pull, t: Any) -> "Turn":
        """Returns the turn of a pull at step t, an int or an array."""
        lands = is_due(t, pull.every, pull.offset)
        if not pull.delay:
            return cls(lands, lands, False)
        # Before the first step there is nothing to send.
        sends = is_due(t, pull.every, pull.sends_at) & (t > 1)
        return cls(sends, lands, is_due(t, pull.every, pull.agrees_at))


def turns_of(pull: Pull, sizes: Sizes | None) -> tuple[int, ...]:
    """The rounds that phases name, by exchange; () if they name none.

    A fragment's exchanges find theirs: a program for each fragment and round were too many.

    Raises:
      ValueError: sizes without an axis of the pull.
    """
    if sizes is None or isinstance(pull.part, Fragment):
        return ()
    alone = dict.fromkeys(WORKER_AXES, 1) if {*WORKER_AXES} & {*sizes} else {}
    known, axes = {**alone, **sizes}, Group(pull.rule.axes).axes
    if missing := [axis for axis in axes if axis not in known]:
        raise ValueError(
            f"`sizes` must have the axis {missing[0]!r} of the method, got {dict(sizes)}"
        )
    return pull.rule.turns(math.prod(known[axis] for axis in axes))


def phase_at(pulls: Pulls, t: int, sizes: Sizes | None = None) -> Phase:
    """Returns the phase of step t.

    >>> import lsgd_jax as lj
    >>> pulls = lj.diloco(4, fragments=2, delay=1).pulls
    >>> [str(phase_at(pulls, t)) for t in (1, 2, 3, 4)]
    ['record 0', 'send 0, land 0', 'record 1', 'send 1, land 1']
    >>> [str(phase_at(lj.sgp().pulls, t, {"node": 2, "local": 2})) for t in (1, 2, 3)]
    ['send 0, land 0, round 0', 'send 0, land 0, round 1', 'send 0, land 0, round 0']
    """
    acts = [Turn.at(pull, t)[:3] for pull in pulls]
    who = lambda row: tuple(sorted({pulls.firsts[k] for k, acts in enumerate(row) if acts}))
    due = Phase(*map(who, zip(*acts)))
    rounds = [_round_at(pulls[k], t, turns_of(pulls[k], sizes)) for k in due.sends]
    is_open = all(r is None for r in rounds)
    return due if is_open else due._replace(rounds=tuple(rounds))


def _round_at(pull: Pull, t: Any, turns: Sequence[int]) -> Any:
    """The round of the message that is sent at step t; None if phases name none."""
    if not turns:
        return None
    number = pull.exchange_number(t - (pull.delay > 0))
    if isinstance(t, int):
        return turns[(number - 1) % len(turns)]
    return jnp.asarray(turns)[(number - 1) % len(turns)]


def all_phases(pulls: Pulls, sizes: Sizes | None = None) -> tuple[Phase, ...]:
    """Returns the phases of all steps from the second on, the quiet one last.

    >>> import lsgd_jax as lj
    >>> [str(phase) for phase in all_phases(lj.lsgd(0.1, 0.1, 16, 64).pulls)]
    ['send 0, land 0', 'send 0+1, land 0+1', 'quiet']
    """
    cycle = cycle_of(pulls, sizes)
    steps = {
        t
        for pull in pulls
        for at in (pull.offset, pull.sends_at, pull.agrees_at)
        for t in range(at or pull.every, cycle + pull.every + 1, pull.every)
        if t > 1
    }
    found = dict.fromkeys(phase_at(pulls, t, sizes) for t in sorted(steps))
    is_quiet_between = len({t % cycle for t in steps}) < cycle
    return (*found, *([QUIET] if is_quiet_between else []))


def cycle_of(pulls: Sequence[Pull], sizes: Sizes | None = None) -> int:
    """Returns the number of steps after which the phases start over."""
    rounds = lambda pull: max(1, len(turns_of(pull, sizes)))
    return math.lcm(*(pull.every * rounds(pull) for pull in pulls))


class Plan(NamedTuple):
    """How a step learns what is due.

    Attributes:
      phase: what is due, or None if the step count decides at run time.
      skips: whether steps on which nothing is due are a branch of their own.
    """

    phase: Phase | None = None
    skips: bool = True

    @classmethod
    def of(cls, pulls: Sequence[Pull], due: Any, phase: Any) -> "Plan":
        """Returns the plan that the arguments of `update` ask for.

        Raises:
          ValueError: both arguments, a `due` that is no bool, a phase of another method.
        """
        if due is not None and not isinstance(due, bool):
            raise ValueError(f"`due` must be a bool while tracing, or None, got {due!r}")
        if phase is None:
            return cls(QUIET, True) if due is False else cls(None, due is None)
        if due is not None:
            raise ValueError(f"pass `due` or `phase`, got {due=}, {phase=}")
        if not isinstance(phase, Phase):
            raise ValueError(f"`phase` must be what `phase(step)` returned, got {phase=!r}")
        for k in itertools.chain(*phase[:3]):
            if not isinstance(k, int):
                raise ValueError(
                    "`phase` must be known while tracing, got an array: name it in "
                    "`Workers.map(step, static='phase')` or "
                    "`jax.jit(step, static_argnames='phase')`"
                )
            if k >= len(pulls):
                raise ValueError(
                    "`phase` must be that of this method, which has "
                    f"{len(pulls)} pulls, got {phase=!s}"
                )
        return cls(phase, True)

    def turns(self, pulls: Pulls, slots: Mapping[int, Pull], t: Array) -> list[Turn]:
        """Returns what each pull, or rotation of pulls, does at step t; see `slots`."""
        if (phase := self.phase) is None:
            return [Turn.at(pull, t) for pull in slots.values()]
        first, (*who, rounds) = pulls.firsts, phase
        round_of = dict(zip(phase.sends, rounds))

        def turn(k: int, pull: Pull) -> Turn:
            acts = [first[k] in each for each in who]
            if first.count(first[k]) > 1 and not isinstance(pull, Rotation):
                # Fragments that are not equal: the count decides which of them it is.
                acts = [act and due for act, due in zip(acts, Turn.at(pull, t))]
            return Turn(*acts, round=round_of.get(k))

        return list(map(turn, slots.keys(), slots.values()))

    def differs(self, pulls: Pulls, t: Array) -> Any:
        """Returns whether the phase is another one than that of step t.

        Raises:
          ValueError: a round that the pull's graph does not have.
        """
        if self.phase is None:
            return False
        differ: list[Any] = []
        slots = pulls.slots(lambda *_: True)
        for pull, turn in zip(slots.values(), self.turns(pulls, slots, t)):
            differ += [act != due for act, due in zip(turn[:3], Turn.at(pull, t))]
            if turn.round is not None:
                turns = pull.rule.turns(Group(pull.rule.axes).size)
                if turn.round not in turns:
                    known = ", ".join(map(str, sorted({*turns}))) or "no rounds"
                    raise ValueError(
                        "`phase` must name a round of the graph of these workers, which "
                        f"has {known}, got phase={self.phase!s}: pass the sizes of their "
                        "axes to `phase(step, sizes)`"
                    )
                differ.append(turn.round != _round_at(pull, t, turns))
        return any_of(*differ)
