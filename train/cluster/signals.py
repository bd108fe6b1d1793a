"""Ctrl-C, SIGTERM and SIGHUP as requests to stop after the current step or test batch."""

import itertools
import os
import signal
import time
import types
from typing import Any

from jax.experimental import multihost_utils

from train.cluster.session import Session
from train.process import interrupts


PATIENCE_S = 15.0  # for a step at which all stop; Kubernetes kills after 30 seconds
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequested(Exception):
    """A test was left, because the run was asked to stop."""


class StopSignals:
    """While open, records SIGINT and SIGTERM instead of dying. A second SIGINT interrupts.

    SIGHUP, the end of a terminal, counts as SIGTERM. So does SIGUSR1: mpirun passes it on,
    whereas it kills after SIGTERM. They and SIGINT stay ignored if they are, as with nohup
    or in a script's background job.

    Several processes all stop at the same point, whichever of them got the signal. jax's
    preemption service catches SIGTERM and agrees on that point. The other signals are
    passed on to it.

    Args:
      session: the processes.

    Attributes:
      received: the signal that any of the processes received, or None.
    """

    def __init__(self, session: Session):
        self.received: signal.Signals | None = None
        self._session = session
        self._is_interrupted = False
        self._points = itertools.count(1)
        self._is_agreed = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in NUMBERS:
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if number == signal.SIGTERM and self._session.has_others:
                continue  # jax has a handler of its own
            if number == signal.SIGTERM or not ignored:
                self._previous[number] = signal.signal(number, self._note)
        if interrupts.noted():  # Ctrl-C came before these handlers were set
            self._note(signal.SIGINT, None)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGINT:
            # Not `received`: Ctrl-C may have reached the other processes before this one.
            if self._is_interrupted:
                raise KeyboardInterrupt
            self._is_interrupted = True
        self.received = signal.Signals(
            number if number == signal.SIGINT else signal.SIGTERM
        )
        if self._session.has_others:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self) -> bool:
        """Whether to stop here. All processes must ask at the same points, in one order."""
        if not self._session.has_others:
            return self.received is not None
        if self._is_agreed:
            return True
        if not multihost_utils.reached_preemption_sync_point(next(self._points)):
            return False
        noted = map(int, self._session.gather(str(int(self.received or signal.SIGTERM))))
        self.received = signal.Signals(min(noted))  # SIGINT is the lowest
        self._is_agreed = True
        return True

    def check(self) -> None:
        """Raises StopRequested if the run was asked to stop; see `asked`."""
        if self.asked():
            raise StopRequested

    def check_hurry(self) -> None:
        """Raises StopRequested if it was SIGTERM, which SIGKILL follows after some time."""
        if self.asked() and self.received == signal.SIGTERM:
            raise StopRequested


class StopTogether(StopSignals):
    """The signals of a run of which processes may be lost.

    If process 0 was asked to stop, all stop at one step, at which a message lands. If
    another one was asked, it waits whether process 0 was, too, and then leaves alone.

    Args:
      crew: the processes.
    """

    def __init__(self, crew: Any):
        super().__init__(Session())
        self._crew = crew
        self._since: float | None = None  # when this process was asked to stop

    def asked(self) -> bool:
        """Whether to stop here."""
        if self._crew.stopped:
            self.received = signal.Signals[self._crew.stopped]
            return True
        if self.received is None:
            return False
        if self._since is None:
            self._since = time.monotonic()
            self._crew.stop_all(self.received.name)
        return time.monotonic() - self._since > PATIENCE_S
