"""The coordinator: which workers are there, how many steps were taken, what was agreed on.

It knows no clock and never waits: engines call it from one thread, wait for what is not
decided yet, and tell it when a wait has lasted too long.
"""

import collections
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Literal, NamedTuple


KEPT = 256  # rounds that are remembered for those who come late,
KEPT_EACH = 8  # or so many per worker: each of many groups holds its own


def lowest(scores: Mapping[int, float]) -> int | None:
    """The index with the lowest score, ties to the lowest; None if no score is finite.

    >>> lowest({2: 1.5, 0: float("nan"), 1: 1.5})
    1
    """
    finite = [(score, i) for i, score in scores.items() if math.isfinite(score)]
    return min(finite)[1] if finite else None


class Score:
    """Mean of the last losses that were measured; inf unless all of them are finite.

    >>> score = Score(window=2)
    >>> [score.add(loss) for loss in (4.0, 2.0, 1.0)]
    [4.0, 3.0, 1.5]
    """

    def __init__(self, window: int):
        self.losses: collections.deque[float] = collections.deque(maxlen=window)

    def add(self, loss: float) -> float:
        """The score with one more loss."""
        self.losses.append(loss)
        return self.value

    @property
    def value(self) -> float:
        """The score; inf before the first loss."""
        mean = sum(self.losses) / len(self.losses) if self.losses else math.inf
        return mean if math.isfinite(mean) else math.inf


class Claim(NamedTuple):
    """A worker's next action.

    Attributes:
      go: 'step', 'join' the round `number`, or 'stop', because all steps are taken.
      number: how many rounds were held before.
    """

    go: Literal["step", "join", "stop"]
    number: int


@dataclasses.dataclass
class Report:
    """The progress of one worker.

    Attributes:
      steps: local steps taken.
      loss: of the last step; None before the first one of this process.
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
    loss: float | None = None
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
    entered: bool = False  # whether its earlier steps are counted
    finished: bool = False  # whether it has taken its last step


class Status(NamedTuple):
    """The status of all workers.

    Attributes:
      present: the workers that are there.
      finished: the workers that have taken their last step, and still serve their state.
      taken: steps that all workers have taken together.
      number: how many rounds were held.
      reports: the last report of each worker.
    """

    present: list[int]
    finished: list[int]
    taken: int
    number: int
    reports: dict[int, Report]

    def leader(self, among: Iterable[int]) -> int | None:
        """The present one of some workers with the lowest finite score; None without."""
        present = set(self.present)
        return lowest({i: self.reports[i].score for i in among if i in present})


class Round(NamedTuple):
    """The values that members of a round have brought; closed: [{member: value}] or []."""

    members: tuple[int, ...]
    values: dict[int, Any]
    closed: list[dict[int, Any]]


class Coordinator:
    """The coordinator of one run.

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
          The workers that are present, and whether the round 'begin', in which all start,
          was held before.
        """
        member = self.members[i]
        alone = self.present in ([], [i])
        # A run that is resumed has taken these steps before, whenever its workers come
        # back; a worker that has no other to take over from takes lost steps again.
        if not self._begun or alone or not member.entered:
            self.taken += steps - member.granted
        member.present, member.granted, member.entered = True, steps, True
        member.finished = False
        return self.present, self._begun

    def recall(self, i: int, steps: int, number: int, closed: dict[Hashable, Any]) -> None:
        """Restores what worker i knows, in a coordinator that replaces one that failed.

        Args:
          steps: its highest step number.
          number: how many rounds were held.
          closed: the results of the last rounds that it was in.
        """
        self.taken += steps - self.members[i].granted
        self.members[i].granted, self.members[i].entered = steps, True
        self.number, self._begun = max(self.number, number), True
        for key, values in closed.items():
            self._rounds[key] = Round(tuple(values), dict(values), [values])

    def leave(self, i: int) -> None:
        """Worker i is absent until it is heard of again; rounds do not wait for it."""
        self.members[i].present = False
        for key, held in self._rounds.items():
            self._close_if_all_are_there(key, held)

    def finish(self, i: int) -> None:
        """Worker i has taken its last step; others may still take over from it."""
        self.members[i].finished = True
        self.leave(i)

    def claim(self, i: int, step: int) -> Claim:
        """Grants worker i its step, or sends it to a round or to the end."""
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
        """Steps of all workers up to the next round."""
        return self.taken + len(self.present) * (self._period or 0)

    # Rounds

    def arrive(
        self, key: Hashable, i: int, value: Any, members: Iterable[int]
    ) -> dict[int, Any] | None:
        """Worker i brings a value to a round; {member: value} once it closes, else None.

        The round waits for the live members that all arrivals so far name.

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
        """The result of a round, None as long as it is open."""
        held = self._rounds.get(key)
        return held.closed[0] if held is not None and held.closed else None

    def close(self, key: Hashable) -> dict[int, Any]:
        """Closes a round without the members that have not come: they are absent."""
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

    def report(self, i: int, report: Report) -> Status:
        """Notes the progress of worker i; returns the status of all."""
        self.members[i].present, self._reports[i] = True, report
        return self.status()

    def status(self) -> Status:
        """The status of all workers."""
        finished = [i for i, member in enumerate(self.members) if member.finished]
        reports = dict(self._reports)
        return Status(self.present, finished, self.taken, self.number, reports)
