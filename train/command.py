"""What every command does around its main function: output is not its job.

Standard output and standard error may be full or closed while a command trains for days.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from train.cluster.exit_status import SIGNALED, STOPPED
from train.cluster.output import python_only


class Lasting:
    """A stream that takes every text, also when it can no longer be written to.

    What cannot be written is dropped, and later texts are tried again.

    Args:
      stream: what to write to.
      name: what messages call it.

    Attributes:
      failure: what went wrong first; '' if nothing has.
      tell: called with that, once, when it happens.
    """

    def __init__(self, stream: TextIO, name: str):
        self._stream, self._name = stream, name
        self.failure = ""
        self.tell: Callable[[str], None] = lambda text: None

    def write(self, text: str) -> int:
        """Writes a text if that is possible."""
        with self._noting_failure():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes out what is buffered if that is possible."""
        with self._noting_failure():
            self._stream.flush()

    def end(self) -> None:
        """Lets go of what could not be written, or Python would say so when it ends."""
        self.flush()
        if self.failure:
            with contextlib.suppress(OSError, ValueError):
                self._stream.close()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # the latter: the stream was closed
            if not self.failure:
                self.failure = f"{self._name} cannot be written any more: {error}"
                self.tell(self.failure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run(main: Callable[[list[str]], int], leaves_files: bool = False) -> int:
    """Runs a command with what follows its name on the command line; the exit status.

    Args:
      main: the command.
      leaves_files: whether its results are in files, so that it goes on when what it prints
        cannot be written. Others end then: quietly if the reader of a pipe has seen enough.
    """
    if sys.getfilesystemencoding() != "utf-8":
        # TensorStore takes no other paths. LANG=C, say: Python must know from the start.
        environment = os.environ | {"PYTHONUTF8": "1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
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
        # What is still buffered must not fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return SIGNALED + signal.SIGPIPE
        print(f"error: {error}", file=sys.stderr)
        return STOPPED


def tell_of_lost_output(tell: Callable[[str], None]) -> None:
    """Has it noted when the screen can no longer be written to, or was not before."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Lasting):
            stream.tell = tell
            if stream.failure:
                tell(stream.failure)


def _open_standard_streams() -> None:
    """Opens those that are closed: a file opened later would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, closefd=False))
