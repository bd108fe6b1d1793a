"""Ctrl-C while a run starts: it ends the imports, and is noted after them.

An exception that Ctrl-C raises may be lost while jax is imported and compiles: Python only
prints it if it comes in a callback of the garbage collector, and the run would train on.
"""

import os
import signal
import types

from train.cluster.exit_status import INTERRUPTED


NOT_BEGUN = "interrupted before training began; nothing was lost"

_noted = False


def end_at_once() -> None:
    """Ends the process with one line at Ctrl-C, from now on. Call it before jax."""
    signal.signal(signal.SIGINT, _end)


def listen() -> None:
    """Notes Ctrl-C from now on; a second one interrupts at once."""
    global _noted
    _noted = False
    signal.signal(signal.SIGINT, _note)


def _end(number: int, frame: types.FrameType | None) -> None:
    os.write(2, f"{NOT_BEGUN}\n".encode())
    os._exit(INTERRUPTED)


def _note(number: int, frame: types.FrameType | None) -> None:
    global _noted
    if _noted:
        raise KeyboardInterrupt
    _noted = True


def noted() -> bool:
    """Whether Ctrl-C has come."""
    return _noted


def check() -> None:
    """Raises KeyboardInterrupt if Ctrl-C has come."""
    if _noted:
        raise KeyboardInterrupt
