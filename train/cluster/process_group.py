"""Processes that are started, watched and ended together. Needs no jax."""

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from train.cluster.exit_status import LOST, SIGNALED


REPEATED = 20  # of a process that failed, the last lines
# What gloo prints of each device that is connected, too many lines to find others between.
NOISE = "[Gloo] Rank "
GONE = (errno.EPIPE, errno.EIO)  # of an output: no reader, no terminal any more
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _discard(screen: TextIO) -> None:
    """Has what a stream still holds, and all that follows, go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, screen.fileno())
        os.close(nowhere)


class Child:
    """A process of the group, and what it prints."""

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        show: Callable[[str, TextIO], None],
    ):
        self.index, self._show_text = index, show
        self.last_errors: deque[str] = deque(maxlen=REPEATED)
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,  # what the process starts itself is ended with it
        )
        # Of each pipe, where it goes and the line that is not complete yet.
        self.pipes: dict[int, tuple[TextIO, bytearray]] = {
            self.popen.stdout.fileno(): (sys.stdout, bytearray()),  # type: ignore
            self.popen.stderr.fileno(): (sys.stderr, bytearray()),  # type: ignore
        }

    def show(self, pipe: int) -> bool:
        """Shows the lines that a pipe holds; whether more may come."""
        screen, line = self.pipes[pipe]
        read = os.read(pipe, 2**16)
        line += read
        while b"\n" in line or (line and not read):
            text, _, rest = line.partition(b"\n")
            line[:] = rest
            self._show_line(text.decode(errors="replace"), screen)
        return bool(read)

    def _show_line(self, text: str, screen: TextIO) -> None:
        if text.startswith(NOISE):
            return
        if screen is sys.stderr:
            self.last_errors.append(text)
        self._show_text(f"[{self.index}] {text}", screen)

    def send(self, number: int) -> None:
        """Sends a signal, unless the process has ended; SIGKILL to all it has started."""
        if self.popen.returncode is None and number == signal.SIGKILL:
            self._kill_all()
        elif self.popen.returncode is None:
            self.popen.send_signal(number)

    def has_ended(self) -> bool:
        """Whether it has ended; what it has left behind is then ended, too."""
        ended = self.popen.poll() is not None
        if ended:
            self._kill_all()
        return ended

    def _kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends it if need be."""
        self.send(signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdout, self.popen.stderr):
            pipe.close()  # type: ignore

    @property
    def status(self) -> int:
        """Its exit status as a shell reports it."""
        code = self.popen.returncode
        return code if code >= 0 else SIGNALED - code

    @property
    def fate(self) -> str:
        """How it ended."""
        code = self.popen.returncode
        if code < 0:
            return f"process {self.index} was ended by {signal.Signals(-code).name}"
        return f"process {self.index} failed with status {code}"


class ProcessGroup:
    """The processes of a run, from their start until all have ended.

    Args:
      commands, environments: of each process.
      grace: seconds that the others get to end in when one has failed.
      survive: whether only the first process may end the others.
      note: called with a line when what the processes print can be shown no longer.

    Attributes:
      sent: the signals that were passed on.
      lost_output: whether the processes were told to stop because no one reads what they
        print any more.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        grace: float,
        survive: bool = False,
        note: Callable[[str], None] = lambda line: None,
    ):
        self.sent: list[int] = []
        self.lost_output = False
        self._note, self._silent = note, set[TextIO]()  # the streams that cannot be written
        self._grace, self._survive = grace, survive
        self._children: list[Child] = []
        self._pipes = selectors.DefaultSelector()
        self._handlers = {number: signal.signal(number, self._pass_on) for number in PASSED}
        try:
            for i, (command, environment) in enumerate(zip(commands, environments)):
                self._children.append(
                    child := Child(i, command, environment, self._show_text)
                )
                for pipe in child.pipes:
                    self._pipes.register(pipe, selectors.EVENT_READ, child)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *_) -> None:
        """Leaves no process behind, whatever happened."""
        for child in self._children:
            child.close()
        self._pipes.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _show_text(self, text: str, screen: TextIO) -> None:
        """Shows a line. If that is not possible any more, the processes are told to stop.

        A full disk is no reason to stop: only where no one reads any more they are.
        """
        if screen in self._silent:
            return
        try:
            print(text, file=screen, flush=True)
        except OSError as error:
            self._silent.add(screen)
            _discard(screen)
            what = f"what the processes print cannot be shown any more ({error.strerror})"
            if error.errno in GONE and not self.lost_output:
                self.lost_output = True
                what += ": they are told to save and to end"
                self._send(signal.SIGTERM)
            self._note(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}")

    def _send(self, number: int) -> None:
        for child in self._children:
            child.send(number)

    def _pass_on(self, number: int, _: object) -> None:
        """Passes a signal on; the third one kills."""
        asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self.sent.append(asked if len(self.sent) < 2 else signal.SIGKILL)
        self._send(self.sent[-1])

    def wait(self) -> Child | None:
        """Shows what the processes print until all have ended.

        Returns:
          The first one that failed, or None. To end because of a signal that was passed on
          is no failure.
        """
        running, failed, deadline = set(self._children), [], float("inf")
        as_told, signals = {0}, [signal.SIGTERM, signal.SIGKILL]
        while running:
            self._show()
            ended = {child for child in running if child.has_ended()}
            running -= ended
            as_told.update(SIGNALED + number for number in self.sent)
            if self.lost_output:
                as_told.add(SIGNALED + signal.SIGTERM)
            unexpected = [child for child in ended if child.status not in as_told]
            for child in unexpected:
                if self._survive and child.index > 0:
                    self._show_text(child.fate, sys.stderr)
                else:
                    failed.append(child)
            now = time.monotonic()
            if failed and len(signals) == 2:
                # One that ends because of another one may be faster than that one.
                because = all(child.status == LOST for child in failed)
                deadline = min(deadline, now + because * self._grace)
            if signals and now >= deadline:
                number = signals.pop(0)
                self._send(number)
                as_told.add(SIGNALED + number)
                deadline = now + self._grace
        while self._show():
            pass
        return min(failed, key=lambda child: child.status == LOST) if failed else None

    def _show(self) -> bool:
        """Shows what has been printed, or comes within 0.1 s; whether there was any."""
        ready = self._pipes.select(0.1)
        for key, _ in ready:
            if not key.data.show(key.fd):
                self._pipes.unregister(key.fd)
        return bool(ready)

    @property
    def status(self) -> int:
        """The highest of the exit statuses that count."""
        counting = self._children[:1] if self._survive else self._children
        return max(child.status for child in counting)
