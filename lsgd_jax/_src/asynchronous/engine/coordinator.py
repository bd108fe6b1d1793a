"""The coordinator: which workers are there, which steps are taken, and rounds of workers.

Engines call it on one event loop. Only `Coordinator.round` waits: for a round to close.
"""

import asyncio
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Literal, NamedTuple


KEPT = 256  # rounds that are remembered for late workers,
KEPT_EACH = 8  # or this many per worker, since each of many groups has its own


class NextAction(NamedTuple):
    """A worker's next action.

    Attributes:
      go: 'step', 'join' the round `number`, or 'stop', because all steps are taken.
      number: rounds held so far.
    """

    go: Literal["step", "join", "stop"]
    number: int


@dataclasses.dataclass
class WorkerReport:
    """The progress of one worker.

    Attributes:
      steps: local steps taken.
      loss: of the last step; None before the first one of this process.
      score: mean loss over its window, by which leaders are elected.
      waited: seconds spent waiting so far.
      longest: seconds of the longest wait.
      staleness: steps taken since the parameters that it was last mixed with were sent, as
        the method counts them.
      bytes_sent: so far.
      speed: steps per second while it computes, over its last ones.
      rounds: the last round that it knows of, in a method that numbers its own rounds.
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


class Status(NamedTuple):
    """The status of all workers.

    Attributes:
      present: the workers that are there.
      finished: the workers that have taken their last step, and still serve their state.
      taken: steps that all workers have taken together.
      number: rounds held so far.
      reports: the last report of each worker.
    """

    present: list[int]
    finished: list[int]
    taken: int
    number: int
    reports: dict[int, WorkerReport]

    def leader(self, among: Iterable[int]) -> int | None:
        """Returns the present worker with the lowest finite score among some, or None.

        Ties go to the lowest index.
        """
        scores = [(self.reports[i].score, i) for i in set(among).intersection(self.present)]
        finite = [(score, i) for score, i in scores if math.isfinite(score)]
        return min(finite)[1] if finite else None


@dataclasses.dataclass
class Round:
    """A round of workers.

    Attributes:
      members: the workers that all arrivals so far name.
      missing: the present members that have not arrived.
      values: the value of each member that has arrived.
      closed: the values when it closed; None while it is open.
      waiting: a future of `closed`, if any worker waits.
    """

    members: set[int]
    missing: set[int]
    values: dict[int, Any] = dataclasses.field(default_factory=dict)
    closed: dict[int, Any] | None = None
    waiting: asyncio.Future | None = None


class Coordinator:
    """The coordinator of one run.

    Steps are granted one by one. Once W · period steps are granted, counted over all
    workers that were present when the last round closed, no more are granted until all
    workers have joined the next round. Fast workers therefore take more of the steps, and
    no worker waits longer than for the step that another one is in. Step numbers are
    absolute: a claim that is made twice, or again by a restarted worker, counts once.

    Claims send workers to rounds with the keys ('join', number).

    Args:
      workers: the number of workers W.
      steps: mean steps per worker after which the run ends: W · steps in all.
      period: steps per worker between rounds. Defaults to no rounds.
      timeout: seconds from the first arrival after which a round closes.
      start: as `timeout`, for the round 'begin', in which all workers start. Defaults to
        `timeout`.

    Attributes:
      taken: steps that all workers have taken together.
      number: rounds held so far.
      begun: whether the round 'begin' was held.
      present: the workers that are there, until a wait for them times out.
      finished: the workers that have taken their last step.

    >>> coordinator = Coordinator(workers=2, steps=2, period=1)
    >>> coordinator.enter(0, steps=0), coordinator.enter(1, steps=0)
    (([0, 1], False), ([0, 1], False))
    >>> [coordinator.claim(0, step).go for step in (1, 1, 2, 3)]
    ['step', 'step', 'step', 'join']
    >>> coordinator.claim(1, step=1)
    NextAction(go='join', number=0)
    """

    def __init__(
        self,
        workers: int,
        steps: int,
        period: int | None = None,
        timeout: float = 60.0,
        start: float | None = None,
    ):
        # Statuses share these lists: a change makes a new one.
        self.present = list(range(workers))
        self.finished = list[int]()
        self._granted = [0] * workers  # the highest step number of each so far
        self._entered = set[int]()  # workers whose earlier steps are counted
        self._reports = {i: WorkerReport() for i in range(workers)}
        self.taken = 0
        self.number = 0
        self.begun = False
        self._all = workers * steps
        self._period = period
        self._timeout = timeout
        self._start = timeout if start is None else start
        self._limit: int | None = None
        self._rounds: OrderedDict[Hashable, Round] = OrderedDict()
        self._forgotten: OrderedDict[Hashable, None] = OrderedDict()

    # Steps

    def enter(self, i: int, steps: int, number: int = 0) -> tuple[list[int], bool]:
        """Lets worker i take part from now on.

        Args:
          i: the worker.
          steps: the steps that it has taken.
          number: rounds held in the run that it resumes.

        Returns:
          The workers that are present, and whether the round 'begin' was held before.
        """
        alone = self.present in ([], [i])
        # A resumed run has taken these steps before, whenever its workers come back. A
        # worker that has no other to take over from takes lost steps again.
        if not self.begun or alone or i not in self._entered:
            self.taken += steps - self._granted[i]
        if not self.begun:
            self.number = max(self.number, number)
        self._granted[i] = steps
        self._entered.add(i)
        self.finished = [j for j in self.finished if j != i]
        self._appear(i)
        return self.present, self.begun

    def leave(self, *workers: int) -> None:
        """Marks workers absent until they are heard of; rounds do not wait for them."""
        self.present = [i for i in self.present if i not in workers]
        for key, held in self._rounds.items():
            if held.closed is None:
                held.missing.difference_update(workers)
                self._close_if_all_are_there(key, held)

    def _appear(self, i: int) -> None:
        """Notes that a worker is present; open rounds wait for it."""
        if i in self.present:
            return
        self.present = sorted([*self.present, i])
        for held in self._rounds.values():
            if held.closed is None and i in held.members:
                held.missing |= {i}.difference(held.values)

    def lost(self, i: int) -> None:
        """Notes that the process of worker i has failed, and with it its progress."""
        self._reports[i] = WorkerReport()
        self.leave(i)

    def missed(self, i: int, peer: int) -> None:
        """Notes that worker i has waited in vain for a peer, which is absent then."""
        self.leave(peer)

    def finish(self, i: int, report: WorkerReport) -> None:
        """Notes that worker i has taken its last step; others may still take over from it.

        report: its last one.
        """
        self.finished = sorted({*self.finished, i})
        self._reports[i] = report
        self.leave(i)

    def claim(self, i: int, step: int) -> NextAction:
        """Grants worker i its step, or sends it to a round or to the end."""
        self._appear(i)
        more = step - self._granted[i]
        if more <= 0:
            return NextAction("step", self.number)
        if self._period is not None:
            limit = self._limit = self._limit or self._next_limit()
            if self.taken + more > limit:
                return NextAction("join", self.number)
        if self.taken + more > self._all:
            return NextAction("stop", self.number)
        self.taken += more
        self._granted[i] = step
        return NextAction("step", self.number)

    def _next_limit(self) -> int:
        """Returns the steps of all workers up to the next round."""
        return self.taken + len(self.present) * (self._period or 0)

    # Rounds

    async def round(
        self, i: int, key: Hashable, value: Any, members: Iterable[int]
    ) -> dict[int, Any] | None:
        """Brings worker i's value to a round and waits until it closes, see `arrive`.

        It closes at the latest when its first worker has waited for the timeout. Returns
        None if it is forgotten.
        """
        loop = asyncio.get_running_loop()
        is_new = key not in self._rounds
        try:
            values = self.arrive(key, i, value, members)
        except KeyError:
            return None
        held = self._rounds[key]
        if is_new:
            timeout = self._start if key == "begin" else self._timeout
            loop.call_later(timeout, self.close, key)
        if values is not None:
            return values
        held.waiting = held.waiting or loop.create_future()
        return await asyncio.shield(held.waiting)

    def arrive(
        self, key: Hashable, i: int, value: Any, members: Iterable[int]
    ) -> dict[int, Any] | None:
        """Brings worker i's value to a round; returns {member: value} if it is closed.

        The round waits for the live members that all arrivals so far name.

        Raises:
          KeyError: it was held so long ago that it is forgotten.
        """
        self._appear(i)
        if key in self._forgotten:
            raise KeyError(key)
        held = self._rounds.get(key)
        if held is None:
            named = set(members)
            held = self._rounds[key] = Round(named, named.intersection(self.present))
            self._forget()
        if held.closed is None:
            held.members.intersection_update(members)
            held.missing &= held.members
            held.missing.discard(i)
            held.values[i] = value
            self._close_if_all_are_there(key, held)
        return held.closed

    def close(self, key: Hashable) -> None:
        """Closes a round without the members that have not come: they are absent."""
        held = self._rounds.get(key)
        if held is not None and held.closed is None:
            self.leave(*held.missing)

    def _close_if_all_are_there(self, key: Hashable, held: Round) -> None:
        if not held.values or held.missing:
            return
        held.closed = dict(sorted(held.values.items()))
        self.begun |= key == "begin"
        if key == ("join", self.number):
            self.number += 1
            self._limit = self._next_limit()
        if held.waiting is not None:
            held.waiting.set_result(held.closed)

    def _forget(self) -> None:
        most = max(KEPT, KEPT_EACH * len(self._reports))
        while len(self._rounds) > most:
            if next(iter(self._rounds.values())).closed is None:
                break  # workers still wait for the oldest one
            key, _ = self._rounds.popitem(last=False)
            self._forgotten[key] = None
        while len(self._forgotten) > 100 * KEPT:
            self._forgotten.popitem(last=False)

    # Reports

    def report(self, i: int, report: WorkerReport) -> Status:
        """Notes the progress of worker i; returns the status of all."""
        self._appear(i)
        self._reports[i] = report
        return self.status()

    def status(self) -> Status:
        """Returns the status of all workers."""
        return Status(
            present=self.present,
            finished=self.finished,
            taken=self.taken,
            number=self.number,
            reports=dict(self._reports),
        )
