"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import os
import signal
import types

from jax.experimental import multihost_utils

from train import coordination


class Interrupts:
    """While open, notes SIGINT and SIGTERM instead of dying; a second SIGINT interrupts.

    With several processes SIGTERM belongs to jax's preemption service, which lets all
    processes stop at the same step, whichever was asked to. A SIGINT is passed on to it.

    Attributes:
      received: the signal that came, to any of the processes, or None.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupts":
        joined = coordination.is_joined()
        numbers = [signal.SIGINT] if joined else [signal.SIGINT, signal.SIGTERM]
        for number in numbers:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if coordination.is_joined():
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_at(self, step: int) -> bool:
        """Whether to stop after this step; to be asked at every step by every process."""
        if not coordination.is_joined():
            return self.received is not None
        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        noted = coordination.gather(str(int(self.received or signal.SIGTERM)))
        self.received = signal.Signals(min(map(int, noted)))  # SIGINT is the lower number
        return True
