"""Crew: the workers of a loop, of whose processes some are lost and come back.

Messages travel beside the steps, so a lost process ends no program of the devices that
train. After each message all processes agree on who lives. If none was lost, the message
counts. Otherwise it changes nothing, and leaves again among those that live, on other CPU
devices, while steps go on until a message leaves or lands. A process that starts again
takes what all workers have in common from the others, and begins at the step of the last
message.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import jax


LOOK_S = 0.01  # between two looks at results, or at what others have said
MOST_FAILURES = 3  # of messages in a row, and no process is lost


class Verdict(NamedTuple):
    """The processes of a loop after a message, as all of them have agreed on.

    Attributes:
      members: the incarnation of each process that lives, by its number.
      lost: those of processes that are gone since the verdict before.
      newcomers: those of processes that have come in.
      failed: why the message has failed in a process, or ''.
      changes: how often members have begun anew to send messages.
      place: where in the training newcomers begin: the steps of each method, and the
        number of messages that have left before the next step.
      stops: why all stop after the landing of the message, or ''.
    """

    members: Mapping[int, int]
    lost: Mapping[int, int]
    newcomers: Mapping[int, int]
    failed: str
    changes: int
    place: Mapping[str, Any]
    stops: str = ""

    @property
    def counts(self) -> bool:
        """Whether the message counts."""
        return not (self.lost or self.failed)

    @property
    def is_change(self) -> bool:
        """Whether messages leave anew, on other devices."""
        return bool(self.lost or self.newcomers or self.failed)


class Judges(Protocol):
    """Says which processes live, see `workers.members`."""

    def meet(self, counts: Sequence[int]) -> Verdict: ...

    def judge(
        self,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        results: Any,
        admits: bool = True,
    ) -> Verdict: ...

    def stop_all(self, why: str) -> None: ...

    def say(self, name: str, value: Any) -> None: ...

    def heard(self, name: str, members: Mapping[int, int]) -> dict[int, Any] | None: ...

    def start(self, work: Callable[[], None], end: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class Sender(Protocol):
    """The pulls of a method, as far as a crew needs them; a `PullsBeside`."""

    away: dict[int, Any]
    crew: Any

    def use(self, twin: Any, order: Any) -> None: ...

    def move_from(self, twin: Any, states: Mapping[int, Any]) -> None: ...

    def welcome(self, newcomers: Any) -> None: ...

    def send_one(self, k: int, t: int, round: int | None) -> None: ...

    def land_nothing(self, k: int) -> None: ...


class SentMessage(NamedTuple):
    """A message that was sent, of which it is not known yet whether it counts.

    Attributes:
      sender, k: the state of a pull.
      before: that state before the message.
      t, round: of the message, see `PullsBeside.send_one`.
      place: see `Verdict`; before this message.
      changes: see `Verdict`.
      results: the state after the message.
      verdict: the verdict about it.
    """

    sender: Sender
    k: int
    before: Any
    t: int
    round: int | None
    place: Mapping[str, Any]
    changes: int
    results: Any
    verdict: "Future[Verdict]"


class LoopEnded(RuntimeError):
    """A loop with `min_workers` cannot go on.

    Too few of its workers live, messages fail although no process is lost, CPU devices for
    messages have run out, or the others have taken their last step. The state that the loop
    has returned last is whole.

    Args:
      reason: the message.
      is_over: whether the others have taken their last step.
    """

    def __init__(self, reason: str, is_over: bool = False):
        super().__init__(reason)
        self.is_over = is_over


class Crew:
    """The workers of one loop.

    Args:
      judges: says which processes live.
      twin_of: the devices beside those that train, of the members of a verdict; None if
        none are left that no message has used.
      order_of: the order of messages on a twin.
      min_workers: the number of workers below which the loop ends.
      senders: the pulls of all methods of the loop.

    Attributes:
      verdict: the last one after which the members have changed, or None before the first.
      num_workers: the number of workers that live.
      news: the verdicts by which members have changed, for the reader to remove.
      stopped: why all workers stop at this step, or ''; see `stop_all`.
    """

    def __init__(
        self,
        judges: Judges,
        twin_of: Callable[[Verdict], Any],
        order_of: Callable[[Any], Any],
        min_workers: int,
        senders: Sequence[Sender],
    ):
        self.verdict: Verdict | None = None
        self.num_workers = 0
        self.news: list[Verdict] = []
        self.stopped = ""
        self._judges = judges
        self._twin_of = twin_of
        self._order_of = order_of
        self._min_workers = min_workers
        self._senders = senders
        self._twin: Any = None
        self._in_flight: deque[SentMessage] = deque()
        self._failure: LoopEnded | None = None
        self._place: dict[str, Any] = {}
        self._again: dict[str, Any] | None = (
            None  # the place of a message that leaves again
        )
        self._changing: Future[None] | None = None
        self._gathered = 0  # calls of `gather` since the last step
        self._missed = 0  # messages of the first step that left before this process came
        self._stops: dict[tuple[Sender, int], str] = {}  # of messages that have not landed
        # Those of the last verdict, and of the members whose devices the pulls use.
        self._changes = 0
        self._boarded = 0
        self._failures = 0  # messages in a row that failed, and no process was lost
        self._to_judge: queue.SimpleQueue[SentMessage | None] = queue.SimpleQueue()
        for sender in senders:
            sender.crew = self

    # The beginning

    def begin(self, counts: Sequence[int]) -> Verdict:
        """Meets the other processes.

        counts: the steps that each method has taken in this process.

        Returns:
          The first verdict, whose place is where newcomers begin.
        """
        verdict = self._judges.meet(counts)
        self._changes = verdict.changes
        self._board(verdict)
        self._judges.start(self._judge_all, end=lambda: self._to_judge.put(None))
        return verdict

    def come_in(self, verdict: Verdict) -> None:
        """Takes what all workers have in common from the others.

        verdict: the one with which this process came in. All pulls have begun.
        """
        self._missed = verdict.place["sent"]
        before = [dict(sender.away) for sender in self._senders]
        own = self._twin
        newcomers = set(verdict.newcomers)
        self._settle(self._welcome(newcomers, verdict), own, before, newcomers)

    def _board(self, verdict: Verdict) -> bool:
        """Lets all pulls use the devices beside of the members; whether there are any."""
        twin = self._twin_of(verdict)
        if twin is None:
            return False
        if self.verdict is not None:
            self.news.append(verdict)
        self.verdict = verdict
        self.num_workers = twin.num_workers
        self._boarded = verdict.changes
        self._twin = twin
        order = self._order_of(twin)
        for sender in self._senders:
            sender.use(twin, order)
        return True

    # Steps

    def step(self, counts: Sequence[int]) -> None:
        """Begins a step.

        counts: the steps that each method has taken.

        Raises:
          LoopEnded: the loop cannot go on.
        """
        self._place = {"counts": list(counts), "sent": 0}
        self._gathered = 0
        if self._changing is None or self._changing.done():
            self._follow_known(in_thread=True)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def has_left(self) -> bool:
        """Whether the next message has left before this process came."""
        self.wait_for_change()
        if self._missed == 0:
            return False
        self._missed -= 1
        self._place["sent"] += 1
        return True

    def sent(self, sender: Sender, k: int, before: Any, t: int, round: int | None) -> None:
        """Notes a message that was sent."""
        place = self._place if self._again is None else self._again
        message = SentMessage(
            sender=sender,
            k=k,
            before=before,
            t=t,
            round=round,
            place=dict(place),
            changes=self._boarded,
            results=sender.away[k],
            verdict=Future(),
        )
        place["sent"] += 1
        self._in_flight.append(message)
        self._to_judge.put(message)

    def has_settled(self, sender: Sender, ks: Sequence[int]) -> bool:
        """Whether the messages of these states count, as far as it is known now."""
        self._follow_known()
        return not any(each.sender is sender and each.k in ks for each in self._in_flight)

    def wait_for(self, sender: Sender, ks: Sequence[int]) -> None:
        """Waits until the messages of these states count."""
        while not self.has_settled(sender, ks):
            self._follow_next()

    def wait_for_messages(self) -> None:
        """Waits until all messages count."""
        self.wait_for_change()
        while self._in_flight:
            self._follow_next()

    def landed(self, sender: Sender, k: int) -> None:
        """Notes that a target has landed, as it does on all workers at this step."""
        self.stopped = self._stops.pop((sender, k), self.stopped)

    def stop_all(self, why: str) -> None:
        """Lets all workers stop at one step, at which they find why in `stopped`.

        It is the landing of a message that has not left yet or is in flight. Only process 0
        can do so; the others may leave alone at any step.
        """
        self._judges.stop_all(why)

    def known(self, sender: Sender) -> dict[int, Any]:
        """The states of a sender before those messages that may not count."""
        with contextlib.suppress(LoopEnded):
            self.wait_for_change()
        states = dict(sender.away)
        for message in reversed(self._in_flight):
            if message.sender is sender:
                states[message.k] = message.before
        return states

    def compute(self, run: Callable[[Any], Any]) -> Any:
        """The results of a program of all workers that live.

        run: returns them, given the twin.

        Raises:
          LoopEnded: the loop cannot go on.
        """
        while True:
            self.wait_for_messages()
            self._check()
            results = run(self._twin)
            # A newcomer would not call this.
            counts = [count + 1 for count in self._place.get("counts", [])]
            place = {"counts": counts, "sent": 0}
            verdict = self._judges.judge(place, place, results, admits=False)
            self._changes = verdict.changes
            if verdict.counts:
                self.stopped = verdict.stops or self.stopped
                return results
            self._change(verdict)

    def gather(self, value: Any) -> list[Any]:
        """What each process says, in their order; JSON. All call it between the same steps.

        A newcomer gets what was said while it did not live.
        """
        self.wait_for_change()
        steps = "-".join(map(str, self._place["counts"]))
        self._gathered += 1
        name = f"{steps}-{self._gathered}"
        self._judges.say(name, value)
        heard = None
        while heard is None:
            # Others may have to let a newcomer in first.
            self._follow_known()
            self._check()
            assert self.verdict is not None
            heard = self._judges.heard(name, self.verdict.members)
            time.sleep(LOOK_S)
        return [heard[process] for process in sorted(heard)]

    def close(self) -> None:
        """Waits for the messages in flight, and for all other processes to do so."""
        self.wait_for_messages()
        self._to_judge.put(None)
        self._judges.close()

    # Verdicts

    def _judge_all(self) -> None:
        """Judges the messages in their order; runs in a thread."""
        while True:
            message = self._to_judge.get()
            if message is None:
                return  # the loop is closed
            if message.changes != self._changes:
                continue  # the members have changed, and it leaves again
            try:
                verdict = self._judged(message)
            except BaseException as error:
                message.verdict.set_exception(error)
                return
            self._changes = verdict.changes
            message.verdict.set_result(verdict)

    def _judged(self, message: SentMessage) -> Verdict:
        place = dict(message.place)
        after = place | {"sent": place["sent"] + 1}
        return self._judges.judge(place, after, message.results)

    def _follow_known(self, in_thread: bool = False) -> None:
        """Follows the verdicts that are there.

        in_thread: whether steps go on during a change, until a message leaves or lands.
        """
        self.wait_for_change()
        while self._in_flight and self._in_flight[0].verdict.done():
            verdict = self._next_verdict()
            if verdict.is_change and in_thread:
                self._changing = Future()
                threading.Thread(target=self._change_in_thread, args=[verdict]).start()
                return
            if verdict.is_change:
                self._change(verdict)

    def _follow_next(self) -> None:
        """Waits for the verdict about the first message in flight, and follows it."""
        verdict = self._next_verdict()
        if verdict.is_change:
            self._change(verdict)

    def _next_verdict(self) -> Verdict:
        """The verdict about the first message in flight. If it counts, it has arrived."""
        verdict = self._in_flight[0].verdict.result()
        if verdict.counts:
            message = self._in_flight.popleft()
            self._failures = 0
            if verdict.stops:
                self._stops[message.sender, message.k] = verdict.stops
        return verdict

    def _change_in_thread(self, verdict: Verdict) -> None:
        changing: Any = self._changing
        try:
            self._change(verdict)
        except BaseException as error:
            changing.set_exception(error)
        else:
            changing.set_result(None)

    def wait_for_change(self) -> None:
        """Waits until messages leave among the new members."""
        if self._changing is not None:
            self._changing.result()
            self._changing = None

    def _change(self, verdict: Verdict) -> None:
        """Goes on among those that live, from the states before the messages in flight."""
        again = list(self._in_flight)
        self._in_flight.clear()
        for message in reversed(again):
            message.sender.away[message.k] = message.before
        before = [dict(sender.away) for sender in self._senders]
        self._settle(verdict, self._twin, before)
        for message in again:
            if self._failure is not None:
                message.sender.land_nothing(message.k)
            else:
                self._again = dict(message.place)
                message.sender.send_one(message.k, message.t, message.round)
        self._again = None

    def _settle(
        self,
        verdict: Verdict,
        old: Any,
        before: Sequence[Mapping[int, Any]],
        newcomers: Collection[int] = (),
    ) -> None:
        """Brings states to the members of a verdict, until these stay the same meanwhile.

        Args:
          verdict: the verdict; nothing happens unless it is a change.
          old: the twin on which the states are.
          before: the states of each sender.
          newcomers: the processes that came in before and have no state of the others.
        """
        while verdict.is_change:
            newcomers = {*newcomers, *verdict.newcomers} & verdict.members.keys()
            if not self._board(verdict):
                self._end(
                    "gloo can connect these processes no more: start all of them again"
                )
                return
            for sender, states in zip(self._senders, before):
                sender.move_from(old, states)
            if self.num_workers < self._min_workers:
                self._end(
                    f"{self.num_workers} workers live, fewer than min_workers="
                    f"{self._min_workers}"
                )
                return
            self._failures += bool(verdict.failed and not verdict.lost)
            if self._failures == MOST_FAILURES:
                self._end(f"no process is lost, but messages fail: {verdict.failed}")
                return
            if not newcomers:
                return
            verdict = self._welcome(newcomers, verdict)

    def _welcome(self, newcomers: Collection[int], verdict: Verdict) -> Verdict:
        """Gives newcomers what all workers have in common. Returns the next verdict."""
        for sender in self._senders:
            sender.welcome(newcomers)
        states = [sender.away for sender in self._senders]
        after = self._judges.judge(verdict.place, verdict.place, states)
        self._changes = after.changes
        return after

    def _end(self, reason: str) -> None:
        """Ends the loop at its next step, whose state is whole."""
        self._failure = LoopEnded(reason)


def error_of(results: Any) -> Exception | None:
    """The error of arrays, once they are known, or None."""
    try:
        jax.block_until_ready(results)
    except Exception as error:
        return error
    return None
