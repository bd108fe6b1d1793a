"""What training did, kept on the devices until reading it blocks nothing."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

import lsgd_jax as lj


class Report(NamedTuple):
    """What one interval of steps did.

    Attributes:
      step: the last step of the interval.
      losses: float [steps, W].
      consensus_distance: at the last step.
      elections: (step, what the pulls had done by then) after each step with an election.
      levels: what the pulls had done by the last step.
      waiting: bool [W], who is in quarantine at the last step.
    """

    step: int
    losses: np.ndarray
    consensus_distance: float
    elections: list[tuple[int, tuple[lj.Diagnostics, ...]]]
    levels: tuple[lj.Diagnostics, ...]
    waiting: np.ndarray


class Ledger:
    """Collects the losses of every step and the diagnostics of every election.

    Nothing is read from the devices before `close_interval`, and then it is the interval
    before the last one: its steps are over, so the loop waits for nothing.
    """

    def __init__(self, workers: lj.Workers, opt_state: Any):
        self._workers = workers
        levels = lj.diagnostics(opt_state)
        self._periods = {level.period for level in levels if level.leader is not None}
        self._diagnose = jax.jit(lj.diagnostics)
        self._wait = jax.jit(lj.waiting)
        self._losses: list[Array] = []
        self._elections: list[tuple[int, Any]] = []
        self._open: list[tuple] = []

    def add(self, step: int, loss: Array, opt_state: Any) -> None:
        """Notes the losses [W] of a step that is on its way."""
        self._losses.append(loss)
        if any(step % period == 0 for period in self._periods):
            self._elections.append((step, self._diagnose(opt_state)))

    def close_interval(self, step: int, state: Any) -> Report | None:
        """Ends an interval here and reads the one before it, if there is one."""
        distance = lj.consensus_distance(state.params)
        now = self._diagnose(state.opt_state), self._wait(state.opt_state)
        self._open.append((step, self._losses, distance, self._elections, *now))
        self._losses, self._elections = [], []
        return self._read() if len(self._open) > 1 else None

    def flush(self) -> Report | None:
        """Reads the interval closed last, and waits for its steps."""
        return self._read() if self._open else None

    def _read(self) -> Report:
        step, losses, distance, elections, levels, waiting = self._workers.fetch(
            self._open.pop(0)
        )
        elections = [(int(due), then) for due, then in elections]
        return Report(
            int(step), np.stack(losses), float(distance), elections, levels, waiting
        )
