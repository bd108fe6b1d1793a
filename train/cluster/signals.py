"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import contextlib
import signal
import threading
import types

import jax

from train.cluster import key_value_store as coordination


PERIOD_S = 0.5  # how often a process looks whether one of them was asked to stop


class Interrupts:
    """While open, notes SIGINT and SIGTERM instead of dying; a second SIGINT interrupts.

    Several processes all stop after the same step, whichever was asked to. When one was, a
    thread of each tells the others the step where it is and waits for theirs; meanwhile its
    process begins no step, so that the one after the highest of these is ahead of all. It
    is a thread because a process may hang in a step that waits for the others.

    Attributes:
      received: the signal that came, to any of the processes, or None.
      asked: the processes that were asked to stop, known when all have stopped.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self.asked: list[int] = []
        self._previous: dict[signal.Signals, object] = {}
        self._step, self._last = 0, float("inf")
        self._meeting = threading.Lock()  # held while the processes find the last step
        self._closed = threading.Event()

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        if coordination.is_joined():
            self._asked, self._at = map(coordination.new_folder, ("asked", "at"))
            threading.Thread(target=self._listen, name="interrupts", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._closed.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore
        if coordination.is_joined():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                coordination.write(self._at, str(self._step))  # one may still wait for it

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def _listen(self) -> None:
        """Waits until a process is asked to stop, and finds out where all can."""
        # Without the service, or another process, the run soon ends anyway.
        with contextlib.suppress(jax.errors.JaxRuntimeError, coordination.Lost):
            while not self._closed.wait(PERIOD_S):
                if self.received is not None:
                    coordination.write(self._asked, "")
                if coordination.read(self._asked):
                    return self._find_last()

    def _find_last(self) -> None:
        with self._meeting:
            coordination.write(self._at, str(self._step))
            steps = coordination.wait_for_members(self._at)
            self._last = max(map(int, steps.values())) + 1

    def stop_at(self, step: int) -> bool:
        """Whether to stop after this step; to be asked at every step by every process."""
        if not coordination.is_joined():
            return self.received is not None
        with self._meeting:
            self._step = step
            if step < self._last:
                return False
        noted = list(map(int, coordination.gather(str(int(self.received or 0)))))
        self.asked = [process for process, x in zip(coordination.members(), noted) if x]
        self.received = signal.Signals(min(filter(None, noted)))  # SIGINT is the lowest
        return True
