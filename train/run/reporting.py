"""What is written and shown of every interval of steps, and the warnings."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import lsgd_jax as lj
from train.config import Config
from train.metrics import traffic
from train.metrics.buffer import Election, Interval
from train.metrics.log import MetricsLog
from train.metrics.progress import Progress
from train.metrics.recent import RecentLosses
from train.run.stopwatch import Pace, Stopwatch


class Reporter:
    """Writes and shows what training did, and warns of what goes wrong.

    Args:
      config: the run's.
      metrics, progress: where to.
      stopwatch: the run's.
      recent: how the workers have done lately.
    """

    def __init__(
        self,
        config: Config,
        metrics: MetricsLog,
        progress: Progress,
        stopwatch: Stopwatch,
        recent: RecentLosses,
    ):
        self._config, self._metrics = config, metrics
        self._progress, self._stopwatch = progress, stopwatch
        self._recent = recent
        self._pace = Pace(at_least=config.log_every // 2)
        self._warned_of_misplaced = False

    def report(self, interval: Interval | None) -> None:
        """Writes and shows what an interval of steps did; nothing for None."""
        if interval is None:
            return
        finite = np.isfinite(interval.losses)
        known = np.where(finite, interval.losses, 0)
        with np.errstate(all="ignore"):
            losses = known.sum(0) / finite.sum(0)
            loss = float(known.sum() / finite.sum())
        self._warn_of_nonfinite(interval.step, finite)
        self._warn_of_restored(interval)
        self._warn_of_misplaced(interval)
        pace = self._pace(interval.done, self._stopwatch.seconds)
        self._metrics.write(
            "train",
            interval.step,
            self._stopwatch.seconds,
            loss=loss,
            losses=losses.tolist(),
            steps_per_second=pace,
            consensus_distance=interval.consensus_distance,
            waiting=int(interval.waiting.sum()),
            **totals(interval.diagnostics),
        )
        self.write_leaders(interval.elections)
        self._progress.show(interval.step, loss, pace)

    def write_leaders(self, elections: Sequence[Election]) -> None:
        """Writes who was elected when."""
        for step, diagnostics in elections:
            for pull in diagnostics:
                if pull.leader is not None and pull.is_due(step):
                    values = leaders(pull, self._config.workers.nodes)
                    self._metrics.write("leaders", step, self._stopwatch.seconds, **values)

    def _warn_of_nonfinite(self, step: int, finite: np.ndarray) -> None:
        bad = np.flatnonzero(~finite.all(axis=0))
        if steps := self._recent.nonfinite_steps:
            self._progress.warn(
                f"no worker has had a finite loss for {steps} steps: nothing is exchanged, "
                f"and training stops after {self._config.stop_after_nonfinite} such steps"
            )
        elif bad.size:
            self._progress.warn(
                f"the loss of worker {_joined(bad)} was not finite at some of the steps up "
                f"to {step}; such a worker is restored at the next exchange"
            )

    def _warn_of_restored(self, interval: Interval) -> None:
        restored = np.flatnonzero(interval.restored)
        if restored.size:
            how = "left out of a mean" if self._config.method.first else "restored"
            self._progress.warn(
                f"worker {_joined(restored)} was not finite and was {how} at an exchange "
                f"(seen up to step {interval.step})"
            )

    def _warn_of_misplaced(self, interval: Interval) -> None:
        steps = np.sum([pull.misplaced for pull in interval.diagnostics], axis=0)
        if np.any(steps) and not self._warned_of_misplaced:
            self._warned_of_misplaced = True
            self._progress.warn(
                f"the parameters of worker {_joined(np.flatnonzero(steps))} were changed "
                f"behind the exchange (seen up to step {interval.step}): the exchange must "
                "stand last in the chain, and nothing else may change parameters"
            )


def leaders(pull: lj.Diagnostics, nodes: int) -> dict[str, Any]:
    """Which workers led at a pull (one of each node, or one of all), and all scores."""
    leader, score = np.asarray(pull.leader), np.asarray(pull.score)
    if pull.axes == ("local",):
        grid = leader.reshape(nodes, -1)
        chosen = grid[:, 0] + np.arange(nodes) * grid.shape[1]
        return {"level": "node", "leaders": chosen.tolist(), "scores": score.tolist()}
    return {"level": "all", "leaders": [int(leader[0])], "scores": score.tolist()}


def totals(diagnostics: tuple[lj.Diagnostics, ...]) -> dict[str, Any]:
    """What each worker has sent, and when; workers restored; by all pulls together."""
    if not diagnostics:
        return {}
    restored = sum(int(np.sum(pull.restored)) for pull in diagnostics)
    return {
        "bytes_sent": sum(pull.bytes_sent for pull in diagnostics),
        "restored": restored,
        "pulls": traffic.schedules(diagnostics),
    }


def _joined(workers: np.ndarray) -> str:
    return ", ".join(map(str, workers.tolist()))
