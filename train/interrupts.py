"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import signal
import types

import jax
from jax.experimental import multihost_utils


class Interrupts:
    """While open, notes SIGINT and SIGTERM instead of dying; a second SIGINT interrupts.

    With several processes SIGTERM belongs to jax's preemption service, which lets all
    processes stop at the same step.

    Attributes:
      received: the signal that came, or None.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupts":
        if jax.process_count() == 1:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def stop_at(self, step: int) -> bool:
        """Whether to stop after this step; to be asked at every step by every process."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM
        return self.received is not None
