"""Seconds of training."""

import contextlib
import time
from collections.abc import Generator


class Stopwatch:
    """Seconds of training. It runs once started, except while paused.

    Seconds for which the process is stopped (Ctrl-Z, SIGSTOP) count, since it cannot tell.

    Args:
      seconds, compile_seconds: those of earlier sessions of the run.

    Attributes:
      pauses: whether `paused` stops it. Set to False while other processes train.
      compile_seconds: time in `compiling`, or before the last `start`.
    """

    def __init__(self, seconds: float = 0.0, compile_seconds: float = 0.0):
        self._before = seconds
        self._since: float | None = None
        self.pauses = True
        self.compile_seconds = compile_seconds

    @property
    def seconds(self) -> float:
        """Training time so far, including earlier sessions of the run."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._before + running

    def start(self) -> None:
        """Starts the stopwatch. If it runs, time since its start was compilation."""
        now = time.monotonic()
        self.compile_seconds += 0.0 if self._since is None else now - self._since
        self._since = now

    @contextlib.contextmanager
    def compiling(self) -> Generator[None]:
        """Stops the stopwatch inside, where programs are compiled."""
        since = time.monotonic()
        with self.paused():
            yield
        self.compile_seconds += time.monotonic() - since

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Stops the stopwatch inside."""
        if not self.pauses:
            yield
            return
        self._before = self.seconds
        self._since = None
        try:
            yield
        finally:
            self.start()


class Pace:
    """Steps per second of training.

    Args:
      at_least: number of steps to measure over. Measured over a few steps that were waited
        for one after another, it would be many times too high.
    """

    def __init__(self, at_least: int):
        self._at_least = at_least
        self._since: tuple[int, float] | None = None
        self._last: float | None = None

    def __call__(self, done: int, seconds: float) -> float | None:
        """Returns the latest pace, or None if it is unknown, as after the compilation.

        Args:
          done: steps that are complete.
          seconds: seconds of training.
        """
        if self._since is None:
            self._since = done, seconds
        steps = done - self._since[0]
        elapsed = seconds - self._since[1]
        if steps > self._at_least and elapsed > 0:
            self._since = (done, seconds)
            self._last = steps / elapsed
        return self._last
