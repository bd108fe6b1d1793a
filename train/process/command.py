"""Runs the main function of a command, with output streams that may fail.

A command that trains for days must survive that its terminal is closed or a disk is full.
"""

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Generator
from typing import Any, TextIO

from train.process.exit_status import SIGNALED, STOPPED, WRONG_USAGE
from train.process.messages import plain
from train.process.output import python_only


UTF8 = ["-X", "utf8"]  # options of Python


class Lasting:
    """A stream whose writes never fail.

    Text that cannot be written is dropped; later text is tried again.

    Args:
      stream: the underlying stream.
      name: its name in messages.

    Attributes:
      failure: a description of the first error, or ''.
      tell: called once with this description when the error occurs.
    """

    def __init__(self, stream: TextIO, name: str):
        self._stream = stream
        self._name = name
        self.failure = ""
        self.tell: Callable[[str], None] = lambda text: None

    def write(self, text: str) -> int:
        """Writes text if possible."""
        with self._noting_failure():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the buffer if possible."""
        with self._noting_failure():
            self._stream.flush()

    def end(self) -> None:
        """Closes a failed stream, so that Python does not report it at exit."""
        self.flush()
        if self.failure:
            with contextlib.suppress(OSError, ValueError):
                self._stream.close()

    @contextlib.contextmanager
    def _noting_failure(self) -> Generator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if not self.failure:
                self.failure = f"{self._name} cannot be written any more: {error}"
                self.tell(self.failure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run(main: Callable[[list[str]], int], leaves_files: bool = False) -> int:
    """Runs a command with the arguments of the process; returns the exit status.

    Args:
      main: the command.
      leaves_files: whether its results are files. Such a command continues when its output
        cannot be written. Other commands end, silently if the reader of a pipe has closed.
    """
    if sys.getfilesystemencoding() != "utf-8":
        # TensorStore requires UTF-8 paths. With LANG=C, for example, Python has to be
        # restarted, because it fixes the encoding at startup. Of several -X utf8=… the
        # first one counts, which also overrides PYTHONUTF8.
        if sys.orig_argv[1:3] == UTF8:
            print("error: Python does not start in UTF-8 mode", file=sys.stderr)
            return WRONG_USAGE
        environment = os.environ | {"PYTHONUTF8": "1"}  # of the processes that it starts
        os.execve(sys.executable, [sys.executable, *UTF8, *sys.orig_argv[1:]], environment)
    _open_standard_streams()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore
    sys.stdout = python_only(sys.stdout)
    if leaves_files:
        sys.stdout = out = Lasting(sys.stdout, "standard output")
        sys.stderr = err = Lasting(sys.stderr, "standard error")
        try:
            return main(sys.argv[1:])
        finally:
            out.end()
            err.end()
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
        return status
    except OSError as error:
        # Buffered output must not fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return SIGNALED + signal.SIGPIPE
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return STOPPED


def with_status(main: Callable[..., int]) -> Callable[..., int]:
    """Makes a command end with one line and a status where it cannot do its work.

    2: wrong usage or a missing package. 1: a file cannot be read or written.
    """

    @functools.wraps(main)
    def run(*arguments: Any) -> int:
        try:
            return main(*arguments)
        except BrokenPipeError:
            raise  # `run` is silent about it
        except (OSError, ValueError, ImportError) as error:
            sys.stdout.flush()  # so that this line is the last one, also in a file of both
            print(f"error: {plain(str(error))}", file=sys.stderr)
            return STOPPED if isinstance(error, OSError) else WRONG_USAGE

    return run


def tell_of_lost_output(tell: Callable[[str], None]) -> None:
    """Calls `tell` when writing to the terminal fails, or at once if it failed before."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Lasting):
            stream.tell = tell
            if stream.failure:
                tell(stream.failure)


def _open_standard_streams() -> None:
    """Opens closed standard streams; a file opened later would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, closefd=False))
