"""Losses and diagnostics of training, kept on the devices until reading them is free."""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import lsgd_jax as lj
from train.metrics.recent import RecentLosses


Election = tuple[int, tuple[lj.Diagnostics, ...]]


class Interval(NamedTuple):
    """Measurements of an interval of steps.

    Attributes:
      step: the last step of the interval.
      losses: float [steps, W]; nan in the rows of steps without a gradient.
      consensus_distance: at the last step; None if it was not measured.
      exchange: the step of the last exchange, and the consensus distances after the step
        before (None if unknown) and after it. None without an exchange, or if distances
        were not measured.
      skipped: the rows of `losses` of steps without a gradient.
      done: the last step that was known to be complete when the interval was read.
      elections: (step, diagnostics of the pulls that elected) for each step at which
        leaders were elected, without those that `take_elections` has returned.
      diagnostics: after the last step.
      waiting: bool [W], whether a worker waits to be restored at the last step.
      restored: int [W], how often each worker was restored in the interval.
      dropped: int [W], how often each worker's target was not finite, and was dropped.
      differed: (worker, leaf) of each worker that differed from the others in the interval,
        with the leaf in which it differed last.
    """

    step: int
    losses: np.ndarray
    consensus_distance: float | None
    done: int
    elections: Sequence[Election] = ()
    diagnostics: tuple[lj.Diagnostics, ...] = ()
    waiting: np.ndarray = np.zeros(0, bool)
    restored: np.ndarray = np.zeros(0, np.int64)
    dropped: np.ndarray = np.zeros(0, np.int64)
    differed: Sequence[tuple[int, str]] = ()
    exchange: tuple[int, float | None, float] | None = None
    skipped: Sequence[int] = ()


class StepInFlight(NamedTuple):
    """A step whose losses have not been read.

    Attributes:
      step: its number.
      result: its losses [W], or an array [W] that is ready with the step.
      has_loss: whether these are losses.
    """

    step: int
    result: Array
    has_loss: bool


class MetricsBuffer:
    """Collects the losses of every step and the diagnostics of every election.

    A step without a gradient has no losses.

    Nothing is read from the devices before `close_interval`, which reads the interval
    before the one that it closes. The steps of that interval are complete, so the loop
    waits for nothing.

    Args:
      workers: the grid.
      opt_state: the optimizers' state.
      method: the pulls in it, which say when leaders are elected, or None.
      recent: receives the losses when they are read.
      step: the step from which the run continues.
      losses: [W] each, the losses of the current interval up to `step`; None for a step
        without a gradient.
      closes: the step at which the interval of a step closes.
      at_home: brings arrays of the state to the devices that train; None if all are there.
      known: the state of the optimizers that may be read at this step.
      late: the steps after an election at which the leader of each pull is known. By
        default it is known at once.
      measures: whether the distance between workers is measured at the end of the interval
        that closes at a step, which takes a mean of all parameters.
      around_exchanges: whether it is also measured before and after the last exchange of
        such an interval.

    Attributes:
      recent: as given.
      read: the step up to which losses have been read.
    """

    def __init__(
        self,
        workers: lj.Workers,
        opt_state: Any,
        recent: RecentLosses,
        method: lj.Exchange | None = None,
        step: int = 0,
        losses: Sequence[Sequence[float] | None] = (),
        closes: Callable[[int], int] = lambda step: step,
        at_home: Callable[[Any], Any] | None = None,
        known: Callable[[Any], Any] = lambda opt_state: opt_state,
        late: Sequence[int] = (),
        measures: Callable[[int], bool] = lambda step: True,
        around_exchanges: bool = True,
    ):
        self.recent = recent
        self.read = step
        self._workers = workers
        diagnose = functools.partial(lj.diagnostics, method=method)
        self._diagnose = _copying(diagnose, at_home)
        self._wait = _copying(lj.waiting, at_home)
        self._known = known
        pulls = workers.fetch(self._diagnose(opt_state))
        self._last = pulls
        self._closes = closes
        self._measures = measures
        self._around_exchanges = around_exchanges
        self._pulls = pulls
        # Of this interval: its last step, and the step of its last exchange, or 0.
        self._closes_at = step
        self._exchange = 0
        self._distances: dict[int, Array] = {}
        # The steps after an election at which its leader is known, of pulls that elect.
        self._late = {
            i: late[i] if late else 0
            for i, pull in enumerate(pulls)
            if pull.leader is not None
        }
        self._unread: deque[StepInFlight] = deque()
        # Read, not reported.
        self._rows: list[np.ndarray | None] = [
            None if row is None else np.asarray(row, np.float32) for row in losses
        ]
        self._reported = step - len(losses)
        self._elections: list[tuple[int, int, Any]] = []  # step, pull, diagnostics
        self._closed: deque[tuple] = deque()

    def add(self, step: int, result: Array, state: Any, has_loss: bool = True) -> None:
        """Adds a step that is in flight, and the state after it.

        Args:
          step, result, has_loss: see `StepInFlight`.
          state: the state.
        """
        self._unread.append(StepInFlight(step, result, has_loss))
        elected = [
            (step - late, i)
            for i, late in self._late.items()
            if self._pulls[i].is_due(step - late)
        ]
        if elected:
            now = self._diagnose(self._known(state.opt_state))
            self._elections += [(since, i, now[i]) for since, i in elected]
        if step > self._closes_at:
            self._closes_at = self._closes(step)
            self._exchange = 0
            if self._around_exchanges and self._measures(self._closes_at):
                self._exchange = self._last_exchange(step)
        if self._exchange and step in (self._exchange - 1, self._exchange):
            self._distances[step] = lj.consensus_distance(state.params)

    def _last_exchange(self, first: int) -> int:
        """The step of the last exchange in an interval, or 0."""
        steps = range(self._closes_at, first - 1, -1)
        due = (t for t in steps if any(pull.is_due(t) for pull in self._pulls))
        return next(due, 0)

    def read_losses(self, until: int) -> None:
        """Reads the losses up to a step. Blocks until that step is complete."""
        taken = []
        while self._unread and self._unread[0].step <= until:
            taken.append(self._unread.popleft())
        if not taken:
            return
        self.read = taken[-1].step
        results = self._workers.fetch([each.result for each in taken])
        for each, row in zip(taken, results):
            if each.has_loss:
                self.recent.add([row])
            self._rows.append(row if each.has_loss else None)

    def unreported_losses(self, until: int) -> list[list[float] | None]:
        """Losses [W] of the current interval up to a step; None without a gradient.

        Blocks until that step is complete.
        """
        self.read_losses(until)
        return [None if row is None else row.tolist() for row in self._rows]

    def take_elections(self) -> list[Election]:
        """Elections that have not been read. Blocks until the latest one is complete."""
        taken = self._elections
        self._elections = []
        return self._fetched(taken)

    def _fetched(self, elections: list[tuple[int, int, Any]]) -> list[Election]:
        pulls = self._workers.fetch([then for _, _, then in elections])
        found: dict[int, list[Any]] = {}
        for (step, _, _), pull in zip(elections, pulls):
            found.setdefault(step, []).append(pull)
        return [(step, tuple(elected)) for step, elected in found.items()]

    def close_interval(self, step: int, state: Any) -> Interval | None:
        """Closes an interval at this step and returns the one before it, or None."""
        measured = {}
        if self._measures(step):
            measured[step] = lj.consensus_distance(state.params)
        opt_state = self._known(state.opt_state)
        now = [read(opt_state) for read in (self._diagnose, self._wait)]
        distances = self._distances | measured
        self._closed.append((step, self._elections, self._exchange, distances, *now))
        self._elections = []
        self._distances = measured
        return self._read() if len(self._closed) > 1 else None

    def flush(self) -> Interval | None:
        """Returns the interval closed last, or None. Blocks until it is complete."""
        return self._read() if self._closed else None

    def _read(self) -> Interval:
        step, elections, exchange, *others = self._closed.popleft()
        distances, diagnostics, waiting = self._workers.fetch(others)
        before = self._last
        self._last = diagnostics
        restored, dropped = _counts(diagnostics) - _counts(before)
        self.read_losses(step)
        count = step - self._reported
        self._reported = step
        rows = self._rows[:count]
        self._rows = self._rows[count:]
        unknown = np.full(self._workers.num_workers, np.nan, np.float32)
        return Interval(
            step=step,
            losses=np.stack([unknown if row is None else row for row in rows]),
            consensus_distance=float(distances[step]) if step in distances else None,
            done=self._done(),
            elections=self._fetched(elections),
            diagnostics=diagnostics,
            waiting=waiting,
            restored=restored,
            dropped=dropped,
            differed=_differed(before, diagnostics),
            exchange=_around(exchange, distances),
            skipped=[i for i, row in enumerate(rows) if row is None],
        )

    def _done(self) -> int:
        """The last step that is known to be complete."""
        done = self.read
        for each in self._unread:
            if not each.result.is_ready():  # type: ignore  # jax does not declare it
                break
            done = each.step
        return done


def _around(
    exchange: int, distances: Mapping[int, np.ndarray]
) -> tuple[int, float | None, float] | None:
    """The step of an exchange and the distances before and after it, as far as known."""
    if exchange not in distances:
        return None
    before = distances.get(exchange - 1)
    after = float(distances[exchange])
    return exchange, None if before is None else float(before), after


def _counts(pulls: Sequence[lj.Diagnostics]) -> np.ndarray:
    """How often each worker was restored, and had a target that was dropped: [2, W]."""

    restored = np.sum([pull.restored for pull in pulls], axis=0)
    dropped = np.zeros_like(restored)
    of_pulls = [pull.dropped for pull in pulls if pull.dropped is not None]
    if of_pulls:
        dropped = np.sum(of_pulls, axis=0)
    return np.array([restored, dropped])


def _differed(
    before: Sequence[lj.Diagnostics], now: Sequence[lj.Diagnostics]
) -> list[tuple[int, str]]:
    """The workers that have differed in between, each with the leaf of the last time."""
    return [
        (int(worker), b.leaves[int(np.asarray(b.leaf)[worker])])
        for a, b in zip(before, now)
        if a.differed is not None and b.differed is not None
        for worker in np.flatnonzero(np.asarray(b.differed) != np.asarray(a.differed))
    ]


def _copying(
    read: Callable[[Any], Any], at_home: Callable[[Any], Any] | None
) -> Callable[[Any], Any]:
    """`read`, whose results are copies: the next step may reuse the buffers of a state."""
    if at_home is None:
        return jax.jit(read)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    return lambda state: copy(at_home(read(state)))
