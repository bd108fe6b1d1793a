"""What training did, kept on the devices until reading it blocks nothing."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

import lsgd_jax as lj


class Interval(NamedTuple):
    """What happened in an interval of steps.

    Attributes:
      step: the last step of the interval.
      losses: float [steps, W].
      consensus_distance: at the last step.
      elections: (step, diagnostics) after each step at which leaders were elected.
      diagnostics: after the last step.
      waiting: bool [W], workers that wait to be restored at the last step.
    """

    step: int
    losses: np.ndarray
    consensus_distance: float
    elections: list[tuple[int, tuple[lj.Diagnostics, ...]]]
    diagnostics: tuple[lj.Diagnostics, ...]
    waiting: np.ndarray


class MetricsBuffer:
    """Collects the losses of every step and the diagnostics of every election.

    Nothing is read from the devices before `close_interval`, and then it is the interval
    before the last one: its steps are over, so the loop waits for nothing.

    Args:
      workers: the grid.
      opt_state: the optimizers' state, to find out when leaders are elected.
    """

    def __init__(self, workers: lj.Workers, opt_state: Any):
        self._workers = workers
        self._diagnose = jax.jit(lj.diagnostics)
        self._wait = jax.jit(lj.waiting)
        pulls = workers.fetch(self._diagnose(opt_state))
        self._electing = [pull for pull in pulls if pull.leader is not None]
        self._losses: list[Array] = []
        self._elections: list[tuple[int, Any]] = []
        self._closed: list[tuple] = []

    def add(self, step: int, loss: Array, opt_state: Any) -> None:
        """Notes the losses [W] of a step that is in flight."""
        self._losses.append(loss)
        if any(pull.is_due(step) for pull in self._electing):
            self._elections.append((step, self._diagnose(opt_state)))

    def close_interval(self, step: int, state: Any) -> Interval | None:
        """Ends an interval here and reads the one before it, if there is one."""
        distance = lj.consensus_distance(state.params)
        now = self._diagnose(state.opt_state), self._wait(state.opt_state)
        self._closed.append((step, self._losses, distance, self._elections, *now))
        self._losses, self._elections = [], []
        return self._read() if len(self._closed) > 1 else None

    def flush(self) -> Interval | None:
        """Reads the interval closed last, and waits for its steps."""
        return self._read() if self._closed else None

    def _read(self) -> Interval:
        step, losses, distance, elections, diagnostics, waiting = self._workers.fetch(
            self._closed.pop(0)
        )
        elections = [(int(due), then) for due, then in elections]
        return Interval(
            int(step), np.stack(losses), float(distance), elections, diagnostics, waiting
        )
