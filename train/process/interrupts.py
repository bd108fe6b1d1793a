"""Ctrl-C while a run starts: it ends the process during imports and is recorded afterwards.

A KeyboardInterrupt can get lost while jax is imported or compiles. If it is raised inside a
callback of the garbage collector, Python only prints it and the run would continue.
"""

import contextlib
import os
import signal
import threading
import types
from collections.abc import Callable, Generator

from train.process.exit_status import INTERRUPTED


NOT_BEGUN = "interrupted before training began; nothing was lost"

_noted = threading.Event()


def end_at_once() -> None:
    """From now on Ctrl-C ends the process with one line. Call it before importing jax."""
    _handle(_end)


def listen() -> None:
    """From now on the first Ctrl-C is recorded, and a second one interrupts at once."""
    _noted.clear()
    _handle(_note)


@contextlib.contextmanager
def answered(answer: Callable[[], None]) -> Generator[None]:
    """Calls `answer` at once if Ctrl-C is pressed inside, even while XLA compiles.

    Python calls the handler of a signal only when C++ code returns. It writes the number of
    the signal to a pipe before, which a thread reads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # which alone receives signals
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT:
                answer()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)


def _handle(handler: Callable[[int, types.FrameType | None], None]) -> None:
    """Sets the handler of Ctrl-C unless it is ignored, as in a script's background job."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _end(number: int, frame: types.FrameType | None) -> None:
    os.write(2, f"{NOT_BEGUN}\n".encode())
    os._exit(INTERRUPTED)


def _note(number: int, frame: types.FrameType | None) -> None:
    if _noted.is_set():
        raise KeyboardInterrupt
    _noted.set()


def noted() -> bool:
    """Whether Ctrl-C was pressed."""
    return _noted.is_set()


def check() -> None:
    """Raises KeyboardInterrupt if Ctrl-C was pressed."""
    if _noted.is_set():
        raise KeyboardInterrupt
