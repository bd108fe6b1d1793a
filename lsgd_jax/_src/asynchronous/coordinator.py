"""The coordinator: who is there, how many steps were taken, what was agreed on.

It knows no clock and never waits: engines call it from one thread, wait for what is not
decided yet, and tell it when a wait has lasted too long.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Literal, NamedTuple

from lsgd_jax._src.asynchronous.election import lowest


KEPT = 256  # rounds that are remembered for those who come late,
KEPT_EACH = 8  # or so many per worker: each of many groups holds its own


class Claim(NamedTuple):
    """What a worker does next.

    Attributes:
      go: 'step', 'join' the round `number`, or 'stop', because all steps are taken.
      number: how many rounds were held before.
    """

    go: Literal["step", "join", "stop"]
    number: int


@dataclasses.dataclass
class Report:
    """How far a worker is.

    Attributes:
      steps: local steps taken.
      loss: of the last step.
      score: mean loss over its window, by which leaders are elected.
      waited: seconds spent waiting so far.
      longest: seconds of the longest wait.
      staleness: how many steps were taken since what it was last mixed with had left, as
        the method counts them.
      bytes_sent: so far.
      speed: steps per second while it computes, over its last ones.
      rounds: the last round that it knows of, by a method that has its own.
    """

    steps: int = 0
    loss: float = math.nan
    score: float = math.inf
    waited: float = 0.0
    longest: float = 0.0
    staleness: float = 0.0
    bytes_sent: int = 0
    speed: float = 0.0
    rounds: int = 0


@dataclasses.dataclass
class Member:
    """A worker as the coordinator knows it."""

    present: bool = True  # until it is waited for in vain
    granted: int = 0  # its highest step number so far


class Standing(NamedTuple):
    """How all workers are doing.

    Attributes:
      present: the workers that are there.
      taken: steps that all workers have taken together.
      number: how many rounds were held.
      reports: of each worker its last report.
    """

    present: list[int]
    taken: int
    number: int
    reports: dict[int, Report]

    def leader(self, among: Iterable[int]) -> int | None:
        """The present one of some workers with the lowest finite score; None without."""
        present = set(self.present)
        return lowest({i: self.reports[i].score for i in among if i in present})


class Round(NamedTuple):
    """What the members of a round have brought; closed: {member: value}, or None."""

    members: tuple[int, ...]
    values: dict[int, Any]
    closed: list[dict[int, Any]]


class Coordinator:
    """Of one run.

    Steps are granted one by one: once W · period have been, counted over all workers that
    were present when the last round closed, no more are until all have joined the next
    round. So the fast take more of them and none waits but for the step that another one
    is in. Step numbers are absolute: a claim that is made twice, or made again by a worker
    that was started again, is counted once.

    A round with the key ('join', number) is one that claims have sent workers to.

    Args:
      workers: W.
      steps: mean steps per worker after which the run ends: W · steps in all.
      period: steps per worker between rounds; None: without.
      number: how many rounds were held before, in the run that is resumed.

    >>> coordinator = Coordinator(workers=2, steps=2, period=1)
    >>> coordinator.enter(0, steps=0), coordinator.enter(1, steps=0)
    (([0, 1], False), ([0, 1], False))
    >>> [coordinator.claim(0, step).go for step in (1, 1, 2, 3)]
    ['step', 'step', 'step', 'join']
    >>> coordinator.claim(1, step=1)
    Claim(go='join', number=0)
    """

    def __init__(
        self, workers: int, steps: int, period: int | None = None, number: int = 0
    ):
        self.members = [Member() for _ in range(workers)]
        self._reports = {i: Report() for i in range(workers)}
        self.taken, self.number, self._begun = 0, number, False
        self._all, self._period = workers * steps, period
        self._limit: int | None = None
        self._rounds: OrderedDict[Hashable, Round] = OrderedDict()
        self._forgotten: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def begun(self) -> bool:
        """Whether the round 'begin', in which all start, was held."""
        return self._begun

    @property
    def present(self) -> list[int]:
        """The workers that are there."""
        return [i for i, member in enumerate(self.members) if member.present]

    # Steps

    def enter(self, i: int, steps: int) -> tuple[list[int], bool]:
        """Worker i takes part from now on, with so many steps taken.

        Returns:
          Who is there, and whether the round 'begin', in which all start, was held before.
        """
        member = self.members[i]
        alone = self.present in ([], [i])
        # In a run that is resumed they were taken before it; and what a worker loses that
        # has no other to take over from is taken again.
        if not self._begun or alone:
            self.taken += steps - member.granted
        member.present, member.granted = True, steps
        return self.present, self._begun

    def recall(self, i: int, steps: int, number: int, closed: dict[Hashable, Any]) -> None:
        """What worker i knows, told to the coordinator that replaces one that was lost.

        Args:
          steps: its highest step number.
          number: how many rounds were held.
          closed: what came out of the last rounds that it was in.
        """
        self.taken += steps - self.members[i].granted
        self.members[i].granted = steps
        self.number, self._begun = max(self.number, number), True
        for key, values in closed.items():
            self._rounds[key] = Round(tuple(values), dict(values), [values])

    def leave(self, i: int) -> None:
        """Worker i is gone until it is heard of again; rounds do not wait for it."""
        self.members[i].present = False
        for key, held in self._rounds.items():
            self._close_if_all_are_there(key, held)

    def claim(self, i: int, step: int) -> Claim:
        """Whether worker i takes its step number so-and-so."""
        member = self.members[i]
        member.present = True
        if (more := step - member.granted) <= 0:
            return Claim("step", self.number)
        if self._period is not None:
            limit = self._limit = self._limit or self._next_limit()
            if self.taken + more > limit:
                return Claim("join", self.number)
        if self.taken + more > self._all:
            return Claim("stop", self.number)
        self.taken += more
        member.granted = step
        return Claim("step", self.number)

    def _next_limit(self) -> int:
        """Steps of all up to the next round."""
        return self.taken + len(self.present) * (self._period or 0)

    # Rounds

    def arrive(
        self, key: Hashable, i: int, value: Any, members: Iterable[int]
    ) -> dict[int, Any] | None:
        """Worker i brings a value to a round: what all have brought, or None as yet.

        The round waits for the members that all who have come so far name.

        Raises:
          KeyError: it was held so long ago that it is forgotten.
        """
        self.members[i].present = True
        if key in self._forgotten:
            raise KeyError(key)
        held = self._rounds.setdefault(key, Round(tuple(members), {}, []))
        if not held.closed:
            awaited = tuple(set(held.members).intersection(members))
            held = self._rounds[key] = held._replace(members=awaited)
            held.values[i] = value
            self._close_if_all_are_there(key, held)
        self._forget()
        return self.look(key)

    def look(self, key: Hashable) -> dict[int, Any] | None:
        """What all have brought to a round, None as long as some are waited for."""
        held = self._rounds.get(key)
        return held.closed[0] if held is not None and held.closed else None

    def close(self, key: Hashable) -> dict[int, Any]:
        """Ends the wait for those who have not come to a round: they are absent."""
        held = self._rounds[key]
        if not held.closed:
            for i in set(held.members).difference(held.values):
                self.leave(i)
        return held.closed[0]

    def _close_if_all_are_there(self, key: Hashable, held: Round) -> None:
        if not held.values or held.closed:
            return
        if all(i in held.values or not self.members[i].present for i in held.members):
            held.closed.append(dict(sorted(held.values.items())))
            self._begun |= key == "begin"
            if key == ("join", self.number):
                self.number += 1
                self._limit = self._next_limit()

    def _forget(self) -> None:
        while len(self._rounds) > max(KEPT, KEPT_EACH * len(self.members)):
            key, _ = self._rounds.popitem(last=False)
            self._forgotten[key] = None
        while len(self._forgotten) > 100 * KEPT:
            self._forgotten.popitem(last=False)

    # Reports

    def report(self, i: int, report: Report) -> Standing:
        """Notes how far worker i is: how all are doing."""
        self.members[i].present, self._reports[i] = True, report
        return self.standing()

    def standing(self) -> Standing:
        """How all workers are doing."""
        return Standing(self.present, self.taken, self.number, dict(self._reports))
