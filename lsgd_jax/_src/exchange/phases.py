"""Phases: which pulls send and land at a step, known while tracing or from the count.

A loop that counts its steps on the host knows what is due. A step that is compiled for one
phase has no conditional, so XLA can run its collectives beside the gradient. A permutation
is part of a program, so on a graph that changes with the exchange a phase also names the
round, if it is told the sizes of the axes: then a program holds one round, not all of them.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from lsgd_jax._src.exchange.branch import any_of
from lsgd_jax._src.exchange.fragments import Slot, slots_of
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.parts import Fragment
from lsgd_jax._src.exchange.schedule import Acts
from lsgd_jax._src.exchange.skips import Skips
from lsgd_jax._src.shared import WORKER_AXES
from lsgd_jax._src.wire.group import Group


Sizes = Mapping[str, int]  # of the axes of the workers


class Phase(NamedTuple):
    """The pulls of a method that act at a step, by their numbers; hashable.

    Each fragment has a number of its own. Where `scan_axis` is an axis of all leaves of a
    part, one number stands for all of them, and the step count tells which of them it is.
    If they are not of equal shapes, the program branches on it.

    Attributes:
      sends: the pulls that communicate: those with a delay at the start of the step, about
        the parameters of the step before; all others at its end.
      lands: the pulls that move the parameters, at the end of the step.
      records: the pulls with a delay that keep the parameters, which they send at the start
        of the next step.
      rounds: for each pull in `sends` the round of its graph, or None if the program does
        not depend on it or the step count decides; () if that is so for all.
      needs_gradient: whether the step computes a gradient, see `Exchange.skip`.
    """

    sends: tuple[int, ...] = ()
    lands: tuple[int, ...] = ()
    records: tuple[int, ...] = ()
    rounds: tuple[int | None, ...] = ()
    needs_gradient: bool = True

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is sent."""
        return not self.sends

    def __str__(self) -> str:
        """The phase in words: 'send 0, land 0', or 'quiet'."""
        known = tuple(r for r in self.rounds if r is not None)
        acts = zip(("send", "land", "record", "round"), (*self[:3], known))
        words = [f"{act} {'+'.join(map(str, who))}" for act, who in acts if who]
        if not self.needs_gradient:
            words.append("no gradient")
        return ", ".join(words) or "quiet"


QUIET = Phase()

# A host asks at every step.
_programs = functools.lru_cache(maxsize=64)(slots_of)


def rounds_of(pull: Pull, sizes: Sizes | None) -> tuple[int, ...]:
    """The rounds that phases name, by exchange; () if they name none.

    A fragment's exchanges find theirs: a program for each fragment and round were too many.

    Raises:
      ValueError: sizes without an axis of the pull.
    """
    if sizes is None or pull.fragments > 1 or isinstance(pull.part, Fragment):
        return ()
    alone = dict.fromkeys(WORKER_AXES, 1) if {*WORKER_AXES} & {*sizes} else {}
    known = {**alone, **sizes}
    axes = Group(pull.rule.axes).axes
    missing = [axis for axis in axes if axis not in known]
    if missing:
        raise ValueError(
            f"`sizes` must have the axis {missing[0]!r} of the method, got {dict(sizes)}"
        )
    return pull.rule.rounds(math.prod(known[axis] for axis in axes))


def phase_at(pulls: Sequence[Pull], t: int, sizes: Sizes | None = None) -> Phase:
    """Returns the phase of step t.

    >>> import lsgd_jax as lj
    >>> pulls = lj.diloco(4, fragments=2, delay=1).pulls
    >>> [str(phase_at(pulls, t)) for t in (1, 2, 3, 4)]
    ['record 0', 'send 0, land 0', 'record 1', 'send 1, land 1']
    >>> [str(phase_at(lj.sgp().pulls, t, {"node": 2, "local": 2})) for t in (1, 2, 3)]
    ['send 0, land 0, round 0', 'send 0, land 0, round 1', 'send 0, land 0, round 0']
    """
    sends = []
    lands = []
    records = []
    rounds: list[int | None] = []
    for slot in _programs(tuple(pulls)):
        acts = slot.pull.schedule.at(t)
        if acts.sends:
            sends.append(slot.number)
            rounds.append(_round_at(slot.pull, t, rounds_of(slot.pull, sizes)))
        if acts.lands:
            lands.append(slot.number)
        if acts.records:
            records.append(slot.number)
    is_open = all(round is None for round in rounds)
    known = () if is_open else tuple(rounds)
    needs_gradient = not any(each.at(t) for each in skips_of(pulls))
    return Phase(tuple(sends), tuple(lands), tuple(records), known, needs_gradient)


def skips_of(pulls: Sequence[Pull]) -> set[Skips]:
    """The steps without a gradient, of all pulls that have some."""
    return {pull.skips for pull in pulls if pull.skips and pull.skips.probability}


def _round_at(pull: Pull, t: Any, rounds: Sequence[int]) -> Any:
    """The round of the message that is sent at step t; None if phases name none."""
    if not rounds:
        return None
    number = pull.schedule.number(t - (pull.delay > 0))
    if isinstance(t, int):
        return rounds[(number - 1) % len(rounds)]
    return jnp.asarray(rounds)[(number - 1) % len(rounds)]


def all_phases(pulls: Sequence[Pull], sizes: Sizes | None = None) -> tuple[Phase, ...]:
    """Returns the phases of all steps from the second on, the quiet one last.

    >>> import lsgd_jax as lj
    >>> [str(phase) for phase in all_phases(lj.lsgd(0.1, 0.1, 16, 64).pulls)]
    ['send 0, land 0', 'send 0+1, land 0+1', 'quiet']
    """
    found: dict[Phase, None] = {}
    for first, last in _stretches(pulls, sizes):
        acting = {t for pull in pulls for t in pull.schedule.steps_between(first, last)}
        found |= dict.fromkeys(phase_at(pulls, t, sizes) for t in sorted(acting))
        if len(acting) < last + 1 - first:
            found[QUIET] = None
    found = {phase._replace(needs_gradient=True): None for phase in found}
    loud = [phase for phase in found if phase != QUIET]
    each = (*loud, QUIET) if QUIET in found else tuple(loud)
    if not skips_of(pulls):
        return each
    return each + tuple(phase._replace(needs_gradient=False) for phase in each)


def _stretches(pulls: Sequence[Pull], sizes: Sizes | None) -> Iterator[tuple[int, int]]:
    """Stretches (first, last) of steps in which no period changes, from step 2 on.

    They are as long as phases may be new: a cycle, and a period for phases that the first
    steps do not have yet.
    """
    begins = sorted({0, *(t for pull in pulls for t in pull.schedule.changes)})
    for begin, end in zip(begins, [*begins[1:], math.inf]):
        cycle = cycle_of(pulls, sizes, begin + 1)
        longest = max((pull.schedule.period_at(begin + 1)[0] for pull in pulls), default=1)
        yield max(begin + 1, 2), int(min(end, begin + cycle + longest))


def cycle_of(pulls: Sequence[Pull], sizes: Sizes | None = None, t: int = 1) -> int:
    """Returns the number of steps after which the phases of around step t start over."""
    periods = []
    for pull in pulls:
        every, _ = pull.schedule.period_at(t)
        periods.append(every * max(1, len(rounds_of(pull, sizes))))
    return math.lcm(*periods)


class Known(NamedTuple):
    """What a step knows of what is due, while it is traced.

    Attributes:
      phase: what is due, or None if the step count decides at run time.
      branches: whether steps on which nothing is due are a branch of their own.
    """

    phase: Phase | None = None
    branches: bool = True

    @classmethod
    def of(cls, pulls: Sequence[Pull], due: Any, phase: Any) -> "Known":
        """Returns what the arguments of `update` say.

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
        count = _programs(tuple(pulls))[-1].number + 1 if pulls else 0
        for k in itertools.chain(*phase[:3]):
            if not isinstance(k, int):
                raise ValueError(
                    "`phase` must be known while tracing, got an array: name it in "
                    "`Workers.map(step, static='phase')` or "
                    "`jax.jit(step, static_argnames='phase')`"
                )
            if k >= count:
                raise ValueError(
                    "`phase` must be that of this method, which has "
                    f"{count} pulls, got {phase=!s}"
                )
        return cls(phase, True)

    def acts(self, slots: Sequence[Slot], t: Array) -> list[Acts]:
        """Returns what the pull of each slot does at step t."""
        if self.phase is None:
            return [slot.pull.schedule.at(t) for slot in slots]
        who = self.phase[:3]
        round_of = dict(zip(self.phase.sends, self.phase.rounds))
        found = []
        for slot in slots:
            acts = Acts(*(slot.number in each for each in who))
            if slot.shares:
                due = slot.pull.schedule.at(t)
                acts = Acts(*(act and is_due for act, is_due in zip(acts[:3], due)))
            found.append(acts._replace(round=round_of.get(slot.number)))
        return found

    def differs(self, pulls: Sequence[Pull], t: Array) -> Any:
        """Returns whether the phase is another one than that of step t.

        Raises:
          ValueError: a round that the pull's graph does not have.
        """
        if self.phase is None:
            return False
        needs_gradient = self.phase.needs_gradient
        differ: list[Any] = [each.at(t) == needs_gradient for each in skips_of(pulls)]
        slots = _programs(tuple(pulls))
        for slot, acts in zip(slots, self.acts(slots, t)):
            pull = slot.pull
            due = pull.schedule.at(t)
            differ += [act != is_due for act, is_due in zip(acts[:3], due)]
            if acts.round is not None:
                rounds = pull.rule.rounds(Group(pull.rule.axes).size)
                if acts.round not in rounds:
                    known = ", ".join(map(str, sorted({*rounds}))) or "no rounds"
                    raise ValueError(
                        "`phase` must name a round of the graph of these workers, which "
                        f"has {known}, got phase={self.phase!s}: pass the sizes of their "
                        "axes to `phase(step, sizes)`"
                    )
                differ.append(acts.round != _round_at(pull, t, rounds))
        return any_of(*differ)
