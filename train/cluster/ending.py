"""The end of a process of several that waits for nothing: its last line, and its status."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from train.cluster.exit_status import LOST


class Ending:
    """Ends this process once, whichever of its threads asks for it, jax's abort included.

    When a process is lost, jax ends the others from C++ by abort(), whatever they hang in,
    with a page of text that does not say how to go on. So SIGABRT prints a last line.

    Args:
      on_abort: that line.

    Attributes:
      on_abort: gives that line.
    """

    def __init__(self, on_abort: str):
        self.on_abort: Callable[[], str] = lambda: on_abort
        self._once = threading.Lock()
        # Python's own handler would run after abort(), that is, never.
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
        on_signal = ctypes.CDLL(None).signal
        on_signal.argtypes, on_signal.restype = (ctypes.c_int, ctypes.c_void_p), None
        on_signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

    def _aborted(self, _: int) -> None:
        """On SIGABRT, in whichever thread it is."""
        self.end(LOST, f"error: {self.on_abort()}")

    def end(self, status: int, line: str) -> NoReturn:
        """Ends the process without waiting for anything."""
        if not self._once.acquire(blocking=False):
            threading.Event().wait()  # another thread is about to
        os.write(2, f"{line}\n".encode())
        os._exit(status)
