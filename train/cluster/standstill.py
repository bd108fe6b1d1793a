"""A process whose main thread hangs while its heartbeats go on and the others wait."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from train.cluster.work import Report


LEAST = 600.0  # seconds, unless the limit is set
LEAST_WHEN_STOPPING = 60.0  # whoever asks a run to stop does not wait for long
TIMES = 10  # the slowest piece of work that any process has done
ALL_TIMES = 6  # the limit, where all do the same: that may well just take long


class Hung(NamedTuple):
    """Processes that make no progress.

    Attributes:
      processes: which.
      reports: what they do.
      seconds: for how long.
      limit: how long they might have.
      all: whether no process makes any progress.
    """

    processes: list[int]
    reports: list[Report]
    seconds: float
    limit: float
    all: bool


class Standstill:
    """Tells from the processes' reports which of them make no progress.

    Args:
      timeout: seconds without progress of a process that is behind others; 0 for no limit;
        None for ten times the slowest piece of work, at least 10 minutes.
    """

    def __init__(self, timeout: int | None):
        self._timeout = timeout
        self._seen: dict[int, tuple[int, float]] = {}  # count, when it last changed

    def look(self, reports: Mapping[int, Report], stopping: bool) -> Hung | None:
        """Those that hang, if any do.

        Args:
          reports: of each process that takes part.
          stopping: whether the run is to stop, so that there is less time.
        """
        now = time.monotonic()
        for process, report in reports.items():
            if self._seen.get(process, (None, 0.0))[0] != report.count:
                self._seen[process] = report.count, now
        if len(reports) < 2:
            return None
        fewest = min(report.count for report in reports.values())
        behind = sorted(i for i, report in reports.items() if report.count == fewest)
        seconds = now - max(self._seen[i][1] for i in behind)
        all_hang = len(behind) == len(reports)
        slowest = max(report.slowest for report in reports.values())
        limit = self._limit(slowest, stopping, all_hang)
        if seconds <= limit:
            return None
        return Hung(behind, [reports[i] for i in behind], seconds, limit, all_hang)

    def _limit(self, slowest: float, stopping: bool, all_hang: bool) -> float:
        if stopping and not all_hang:
            usual = max(LEAST_WHEN_STOPPING, 3 * slowest)
            return min(usual, self._timeout) if self._timeout else usual
        if self._timeout == 0 and not stopping:
            return float("inf")
        usual = self._timeout or max(LEAST, TIMES * slowest)
        return ALL_TIMES * usual if all_hang else usual
