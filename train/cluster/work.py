"""What the main thread of a process does: the heartbeat tells the other processes."""

import json
import os
import time
from typing import NamedTuple


class Work:
    """What this process does, and how much it has done.

    Heartbeats come from a thread of their own, so that they say nothing of a main thread
    that hangs. This does: all processes begin the same pieces of work in the same order,
    and one that the others wait for has begun fewer than they have.

    Attributes:
      count: pieces of work begun so far.
      doing: what it does now.
      slowest: seconds that the slowest piece of work took.
    """

    def __init__(self):
        self.count, self.doing, self.slowest = 0, "at the start", 0.0
        self._began = time.monotonic()

    def begin(self, doing: str | None = None) -> None:
        """Notes that the next piece of work begins; by None the work keeps its name."""
        now = time.monotonic()
        self.slowest = max(self.slowest, now - self._began)
        self._began = now
        self.count += 1
        self.doing = doing or self.doing

    def report(self) -> str:
        """All this as a text for the other processes."""
        return json.dumps(Report(self.count, self.doing, self.slowest, os.getpid()))


class Report(NamedTuple):
    """What a process says of its work: see `Work`, and its id on its host."""

    count: int
    doing: str
    slowest: float
    pid: int

    @classmethod
    def read(cls, text: str) -> "Report":
        """What `Work.report` wrote.

        >>> Report.read(Work().report()).doing
        'at the start'
        """
        return cls(*json.loads(text))
