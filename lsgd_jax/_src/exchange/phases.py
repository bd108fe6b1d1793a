"""Phases: which pulls send and land at a step, known while tracing or from the count.

A loop that counts its steps on the host knows what is due. A step that is compiled for one
phase has no conditional, so XLA can run its collectives beside the gradient.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import Array

from lsgd_jax._src.exchange.branch import any_of, is_due
from lsgd_jax._src.exchange.kernel import Pull


class Phase(NamedTuple):
    """The pulls of a method that act at a step, by their indices; hashable.

    Attributes:
      sends: the pulls that communicate: those with a delay at the start of the step, about
        the parameters of the step before; all others at its end.
      lands: the pulls that move the parameters, at the end of the step.
      records: the pulls with a delay that keep the parameters, which they send at the start
        of the next step.
    """

    sends: tuple[int, ...] = ()
    lands: tuple[int, ...] = ()
    records: tuple[int, ...] = ()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is sent."""
        return not self.sends

    def __str__(self) -> str:
        """The phase in words: 'send 0, land 0', or 'quiet'."""
        acts = zip(("send", "land", "record"), self)
        words = [f"{act} {'+'.join(map(str, who))}" for act, who in acts if who]
        return ", ".join(words) or "quiet"


QUIET = Phase()


class Turn(NamedTuple):
    """Whether one pull sends, lands and records at a step: bools, or arrays of bool."""

    sends: Any
    lands: Any
    records: Any

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


def phase_at(pulls: Sequence[Pull], t: int) -> Phase:
    """Returns the phase of step t.

    >>> import lsgd_jax as lj
    >>> pulls = lj.diloco(4, fragments=2, delay=1).pulls
    >>> [str(phase_at(pulls, t)) for t in (1, 2, 3, 4)]
    ['record 0', 'send 0, land 0', 'record 1', 'send 1, land 1']
    """
    turns = [Turn.at(pull, t) for pull in pulls]
    return Phase(*(tuple(k for k, due in enumerate(row) if due) for row in zip(*turns)))


def all_phases(pulls: Sequence[Pull]) -> tuple[Phase, ...]:
    """Returns the phases of all steps from the second on, the quiet one last.

    >>> import lsgd_jax as lj
    >>> [str(phase) for phase in all_phases(lj.lsgd(0.1, 0.1, 16, 64).pulls)]
    ['send 0, land 0', 'send 0+1, land 0+1', 'quiet']
    """
    cycle = math.lcm(*(pull.every for pull in pulls))
    steps = {
        t
        for pull in pulls
        for at in (pull.offset, pull.sends_at, pull.agrees_at)
        for t in range(at or pull.every, cycle + pull.every + 1, pull.every)
        if t > 1
    }
    found = dict.fromkeys(phase_at(pulls, t) for t in sorted(steps))
    is_quiet_between = len({t % cycle for t in steps}) < cycle
    return (*found, *([QUIET] if is_quiet_between else []))


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
        for k in itertools.chain(*phase):
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

    def turns(self, pulls: Sequence[Pull], t: Array) -> list[Turn]:
        """Returns what each pull does at step t."""
        if self.phase is None:
            return [Turn.at(pull, t) for pull in pulls]
        return [Turn(*(k in who for who in self.phase)) for k in range(len(pulls))]

    def differs(self, pulls: Sequence[Pull], t: Array) -> Any:
        """Returns whether the phase is another one than that of step t."""
        if self.phase is None:
            return False
        pairs = zip(
            itertools.chain(*self.turns(pulls, t)),
            itertools.chain(*(Turn.at(pull, t) for pull in pulls)),
        )
        return any_of(*(given != known for given, known in pairs))
