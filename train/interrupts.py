"""Ctrl-C while a run starts: noted, and acted on where it is safe.

An exception that Ctrl-C raises may be lost while jax is imported and compiles: Python only
prints it if it comes in a callback of the garbage collector, and the run would train on.
"""

import signal
import threading
import types


_noted = threading.Event()


def listen() -> None:
    """Notes Ctrl-C from now on; a second one interrupts at once. Call it before jax."""
    _noted.clear()
    signal.signal(signal.SIGINT, _note)


def _note(number: int, frame: types.FrameType | None) -> None:
    if _noted.is_set():
        raise KeyboardInterrupt
    _noted.set()


def noted() -> bool:
    """Whether Ctrl-C has come."""
    return _noted.is_set()


def check() -> None:
    """Raises KeyboardInterrupt if Ctrl-C has come."""
    if noted():
        raise KeyboardInterrupt
