"""Seconds of training."""

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Seconds of training; it does not run before it is started, nor while paused.

    Args:
      seconds: training time before, in earlier sessions of the run.
    """

    def __init__(self, seconds: float = 0.0):
        self._before = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Training time so far, earlier sessions of the run included."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._before + running

    def start(self) -> None:
        """Runs from here on."""
        self._since = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not run inside."""
        self._before, self._since = self.seconds, None
        try:
            yield
        finally:
            self.start()
