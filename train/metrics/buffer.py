"""What training did, kept on the devices until reading it blocks nothing."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

import lsgd_jax as lj
from train.metrics.recent import RecentLosses


Election = tuple[int, tuple[lj.Diagnostics, ...]]


class Interval(NamedTuple):
    """What happened in an interval of steps.

    Attributes:
      step: the last step of the interval.
      losses: float [steps, W].
      consensus_distance: at the last step.
      elections: (step, diagnostics) after each step at which leaders were elected, those
        left out that `take_elections` has returned.
      diagnostics: after the last step.
      waiting: bool [W], workers that wait to be restored at the last step.
      restored: int [W], how often each worker was restored in the interval.
      done: the last step that was known to be over when this was read.
    """

    step: int
    losses: np.ndarray
    consensus_distance: float
    elections: list[Election]
    diagnostics: tuple[lj.Diagnostics, ...]
    waiting: np.ndarray
    restored: np.ndarray
    done: int


class MetricsBuffer:
    """Collects the losses of every step and the diagnostics of every election.

    Nothing is read from the devices before `close_interval`, and then it is the interval
    before the last one: its steps are over, so the loop waits for nothing.

    Args:
      workers: the grid.
      opt_state: the optimizers' state, to find out when leaders are elected.
      recent: is told the losses when they are read.
      step: from which the run goes on.
      losses: [W] each, those of the interval in progress up to `step`.

    Attributes:
      recent: as given.
      read: the step up to which losses have been read.
    """

    def __init__(
        self,
        workers: lj.Workers,
        opt_state: Any,
        recent: RecentLosses,
        step: int = 0,
        losses: Sequence[Sequence[float]] = (),
    ):
        self.recent, self.read = recent, step
        self._workers = workers
        self._diagnose = jax.jit(lj.diagnostics)
        self._wait = jax.jit(lj.waiting)
        pulls = workers.fetch(self._diagnose(opt_state))
        self._restored = _restored(pulls)
        self._electing = [pull for pull in pulls if pull.leader is not None]
        self._unread: deque[tuple[int, Array]] = deque()
        self._rows = [np.asarray(loss, np.float32) for loss in losses]  # read, not reported
        self._reported = step - len(losses)
        self._elections: list[tuple[int, Any]] = []
        self._closed: deque[tuple] = deque()

    def add(self, step: int, loss: Array, opt_state: Any) -> None:
        """Notes the losses [W] of a step that is in flight."""
        self._unread.append((step, loss))
        if any(pull.is_due(step) for pull in self._electing):
            self._elections.append((step, self._diagnose(opt_state)))

    def read_losses(self, until: int) -> None:
        """Reads the losses up to a step, and waits for it if it is in flight."""
        losses = []
        while self._unread and self._unread[0][0] <= until:
            self.read, loss = self._unread.popleft()
            losses.append(loss)
        if losses:
            rows = self._workers.fetch(losses)
            self.recent.add(rows)
            self._rows += rows

    def unreported_losses(self, until: int) -> list[list[float]]:
        """The losses [W] of the interval in progress up to a step, which it waits for."""
        self.read_losses(until)
        return [row.tolist() for row in self._rows]

    def take_elections(self) -> list[Election]:
        """The elections that have not been read, the latest of which it waits for."""
        taken, self._elections = self._elections, []
        return self._fetched(taken)

    def _fetched(self, elections: list[tuple[int, Any]]) -> list[Election]:
        steps = [step for step, _ in elections]
        return list(zip(steps, self._workers.fetch([then for _, then in elections])))

    def close_interval(self, step: int, state: Any) -> Interval | None:
        """Ends an interval here and reads the one before it, if there is one."""
        distance = lj.consensus_distance(state.params)
        now = [read(state.opt_state) for read in (self._diagnose, self._wait)]
        self._closed.append((step, self._elections, distance, *now))
        self._elections = []
        return self._read() if len(self._closed) > 1 else None

    def flush(self) -> Interval | None:
        """Reads the interval closed last, and waits for its steps."""
        return self._read() if self._closed else None

    def _read(self) -> Interval:
        step, elections, *others = self._closed.popleft()
        distance, diagnostics, waiting = self._workers.fetch(others)
        before, self._restored = self._restored, _restored(diagnostics)
        self.read_losses(step)
        count, self._reported = step - self._reported, step
        losses, self._rows = self._rows[:count], self._rows[count:]
        return Interval(
            step,
            np.stack(losses),
            float(distance),
            self._fetched(elections),
            diagnostics,
            waiting,
            self._restored - before,
            self._done(),
        )

    def _done(self) -> int:
        """The last step that is known to be over."""
        done = self.read
        for step, loss in self._unread:
            if not loss.is_ready():  # type: ignore  # jax does not declare it
                break
            done = step
        return done


def _restored(pulls: Sequence[lj.Diagnostics]) -> np.ndarray:
    """How often each worker was restored, by all pulls together."""
    return np.sum([pull.restored for pull in pulls], axis=0)
