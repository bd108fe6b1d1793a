"""Ctrl-C, SIGTERM and SIGHUP as a request to stop after the current step."""

import contextlib
import signal
import socket
import threading
import types

import jax

from train import interrupts
from train.cluster.lost import Late, Lost
from train.cluster.session import Session


NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While open, notes SIGINT and SIGTERM instead of dying; a second SIGINT interrupts.

    SIGHUP, the end of a terminal, is taken as SIGTERM, unless it is ignored (nohup).

    Several processes all stop after the same step, whichever was asked to. When one was, a
    thread of each tells the others the step where it is and waits for theirs; meanwhile its
    process begins no step, so that the one after the highest of these is ahead of all. It
    is a thread because a process may hang in a step that waits for the others; for the same
    reason it learns of signals by itself: Python's handlers have to wait for the main
    thread. From then on there is less time for progress, see `train.cluster.standstill`.

    Args:
      session: the processes.
      period: seconds after which a process looks again whether any was asked to stop.

    Attributes:
      received: the signal that came, to any of the processes, or None.
      asked: the processes that were asked to stop, known when all have stopped.
    """

    def __init__(self, session: Session, period: float = 0.5):
        self.received: signal.Signals | None = None
        self.asked: list[int] = []
        self._session, self._period = session, period
        self._previous: dict[signal.Signals, object] = {}
        self._step, self._last = 0, float("inf")
        self._meeting = threading.Lock()  # held while the processes find the last step
        self._closed = threading.Event()
        self._woken = False  # whether a signal has come that may not be noted yet
        self._previous_fd: int | None = None

    def __enter__(self) -> "StopSignals":
        for number in NUMBERS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        if interrupts.noted():  # before these handlers were set
            self._note(signal.SIGINT, None)
        if self._session.has_others:
            self._asked, self._at = map(self._session.new_folder, ("asked", "at"))
            self._session.stopping = False
            self._wake_by_signals()
            self._thread = threading.Thread(
                target=self._listen, name="signals", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._closed.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore
        if self._session.has_others:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                # One may still wait for it.
                self._session.write(self._at, str(self._step))
            if self._previous_fd is not None:
                signal.set_wakeup_fd(self._previous_fd)
            self._sender.close()  # the thread learns of it
            self._thread.join(self._period)
            self._wakeups.close()

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = signal.Signals(
            number if number == signal.SIGINT else signal.SIGTERM
        )

    def _wake_by_signals(self) -> None:
        """Has the numbers of signals sent to a socket, whatever the main thread does."""
        self._wakeups, self._sender = socket.socketpair()
        self._wakeups.settimeout(self._period)
        self._sender.setblocking(False)
        if threading.current_thread() is threading.main_thread():  # only it may set this
            self._previous_fd = signal.set_wakeup_fd(
                self._sender.fileno(), warn_on_full_buffer=False
            )

    def _is_asked(self) -> bool:
        """Whether this process is asked to stop, now or within a period."""
        with contextlib.suppress(OSError):  # none in time, or closed
            numbers = self._wakeups.recv(64)
            self._woken = self._woken or bool(set(numbers) & set(self._previous))
        return self._woken or self.received is not None

    def _listen(self) -> None:
        """Waits until a process is asked to stop, and finds out where all can."""
        # Without the service, or another process, the run soon ends anyway.
        with contextlib.suppress(jax.errors.JaxRuntimeError, Late, Lost):
            while not self._closed.is_set():
                if self._is_asked():
                    self._session.write(self._asked, "")
                if self._session.read(self._asked):
                    self._session.stopping = True
                    return self._find_last()

    def _find_last(self) -> None:
        with self._meeting:
            self._session.write(self._at, str(self._step))
            steps = self._session.wait_for_members(self._at)
            self._last = max(map(int, steps.values())) + 1

    def stop_at(self, step: int) -> bool:
        """Whether to stop after this step; to be asked at every step by every process."""
        if not self._session.has_others:
            return self.received is not None
        with self._meeting:
            self._step = step
            if step < self._last:
                return False
        noted = list(map(int, self._session.gather(str(int(self.received or 0)))))
        self.asked = [i for i, number in zip(self._session.members, noted) if number]
        self.received = signal.Signals(min(filter(None, noted)))  # SIGINT is the lowest
        return True
