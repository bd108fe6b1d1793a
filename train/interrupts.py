"""Ctrl-C while a run starts: it ends the imports, and is noted after them.

An exception that Ctrl-C raises may be lost while jax is imported and compiles: Python only
prints it if it comes in a callback of the garbage collector, and the run would train on.
"""

import os
import signal
import threading
import types

from train.cluster.exit_status import INTERRUPTED


NOT_BEGUN = "interrupted before training began; nothing was lost"

_noted = threading.Event()


def end_at_once() -> None:
    """Ends the process with one line at Ctrl-C, from now on. Call it before jax."""
    signal.signal(signal.SIGINT, _end)


def listen() -> None:
    """Notes Ctrl-C from now on; a second one interrupts at once."""
    _noted.clear()
    signal.signal(signal.SIGINT, _note)


def _end(number: int, frame: types.FrameType | None) -> None:
    os.write(2, f"{NOT_BEGUN}\n".encode())
    os._exit(INTERRUPTED)


def _note(number: int, frame: types.FrameType | None) -> None:
    if _noted.is_set():
        raise KeyboardInterrupt
    _noted.set()


def noted() -> bool:
    """Whether Ctrl-C has come."""
    return _noted.is_set()


def check() -> None:
    """Raises KeyboardInterrupt if Ctrl-C has come."""
    if _noted.is_set():
        raise KeyboardInterrupt
