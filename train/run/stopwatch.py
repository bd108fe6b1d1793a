"""Seconds of training."""

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Seconds of training; it does not run before it is started, nor while paused.

    Seconds for which the process is stopped (Ctrl-Z, SIGSTOP) count: it has no way to know.

    Args:
      seconds: training time before, in earlier sessions of the run.
    """

    def __init__(self, seconds: float = 0.0):
        self._before = seconds
        self._since: float | None = None
        self._goes_on = False

    @property
    def seconds(self) -> float:
        """Training time so far, earlier sessions of the run included."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._before + running

    def start(self) -> None:
        """Runs from here on."""
        self._since = time.monotonic()

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside, it runs on when it is `paused`: so does training, elsewhere."""
        self._goes_on = True
        try:
            yield
        finally:
            self._goes_on = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not run inside."""
        if self._goes_on:
            yield
            return
        self._before, self._since = self.seconds, None
        try:
            yield
        finally:
            self.start()


class Pace:
    """Steps per second of training.

    Args:
      at_least: of how many steps: of a few that were waited for, one after another, it
        would be many times too high.
    """

    def __init__(self, at_least: int):
        self._at_least = at_least
        self._since: tuple[int, float] | None = None
        self._last: float | None = None

    def __call__(self, done: int, seconds: float) -> float | None:
        """The latest pace; None if it is not known, as after the compilation.

        Args:
          done: steps that are over.
          seconds: of training.
        """
        if self._since is None:
            self._since = done, seconds
        steps, elapsed = done - self._since[0], seconds - self._since[1]
        if steps > self._at_least and elapsed > 0:
            self._since, self._last = (done, seconds), steps / elapsed
        return self._last
