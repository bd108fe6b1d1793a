"""Who of several processes is still there, and last words when somebody is not.

When a process is lost, jax's coordination service notices after the heartbeat timeout (at
once if it was process 0, which is the service) and ends the others from C++ by abort(),
whatever they hang in, with a page of text that does not say how to go on. So a last line is
printed on abort; the signs of life that the processes leave at the service tell who has
stopped. A process that fails by itself leaves word, and the others end at once.
"""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax

from train.cluster import key_value_store as coordination


CRASHED = os.EX_SOFTWARE  # 70: an error that nobody expected
LOST = os.EX_TEMPFAIL  # 75: another process was lost or could not be reached; try again

LIFE = "life"  # the folder of the signs of life: a count, DONE, or [status, last word]
DONE = "done"


class Watch:
    """The watch of a process over itself and the others, from before it joins them.

    Args:
      not_joined: what to say if jax ends the process before it has joined the others.

    Attributes:
      where: says how far this process is and how to go on, for its last line.
      hosts: the host of each process.
    """

    def __init__(self, not_joined: str):
        self.where: Callable[[], str] = lambda: "before training began"
        self.hosts: list[str] = []
        self._not_joined = not_joined
        self._timeout, self._survive = 0.0, False
        self._seen: dict[int, tuple[str, float]] = {}  # sign of life, when it last changed
        self._looked = 0.0
        self._done = threading.Event()
        self._signing = threading.Lock()  # held while a sign is left; after the last, too
        self._ending = threading.Lock()  # taken once, by the thread that ends the process
        # Python's own handler would run after abort(), that is, never.
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
        on_signal = ctypes.CDLL(None).signal
        on_signal.argtypes, on_signal.restype = (ctypes.c_int, ctypes.c_void_p), None
        on_signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

    def begin(self, heartbeat_timeout: float, survive: bool) -> None:
        """Begins to watch, now that the process has joined the others.

        Args:
          heartbeat_timeout: seconds without a sign of life that mean a loss.
          survive: whether jax lets the others live, which then are told of a loss here.
        """
        self.hosts = coordination.first_gather(socket.gethostname())
        self._timeout, self._looked = heartbeat_timeout, time.monotonic()
        self._survive = survive
        sys.excepthook = self._crashed
        thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        thread.start()
        atexit.register(self._finish, thread)

    def _finish(self, thread: threading.Thread) -> None:
        """Ends the watch at exit, just before jax leaves the others."""
        self._done.set()
        thread.join(self._period)
        self._signing.acquire()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            coordination.write(LIFE, DONE)
            # Where losses are survived jax does not let process 0 wait for the others, who
            # need it even to leave. It is alone when it is the only one that lives.
            if self._survive and coordination.process_id() == 0:
                while len(coordination.lost_members()) < len(coordination.members()) - 1:
                    pass

    @property
    def _period(self) -> float:
        return min(1.0, self._timeout / 10)

    def _watch(self) -> None:
        """Gives signs of life and looks for the others', until the process is done."""
        for count in itertools.count():
            # Without the service jax will soon end this process.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                with self._signing:
                    coordination.write(LIFE, str(count))
                signs = coordination.read(LIFE)
                self._looked = time.monotonic()
                for process, sign in signs.items():
                    if self._seen.get(process, ("", 0.0))[0] != sign:
                        self._seen[process] = sign, self._looked
                    if sign.startswith("[") and process != coordination.process_id():
                        self._follow(process, *json.loads(sign))
            if self._survive:
                coordination.note_lost(self._silent_for(self._timeout))
            if self._done.wait(self._period):
                return

    def _follow(self, process: int, status: int, line: str) -> NoReturn:
        """Ends this process because another one has left word."""
        if status != CRASHED:
            self._end(status, f"error: {self.names([process])}: {line}")
        self._end(LOST, f"error: {self.names([process])} crashed {self.where()} ({line})")

    def leave(self, status: int, line: str, word: str | None = None) -> NoReturn:
        """Ends this process with a last line, and all others with a word (or that line)."""
        self._signing.acquire()  # no sign of life must take the place of the last word
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            coordination.write(LIFE, json.dumps([status, line if word is None else word]))
            if coordination.process_id() == 0:
                time.sleep(3 * self._period)  # until everybody has read it: here it is kept
        self._end(status, line if status == 130 else f"error: {line}")

    def _crashed(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """What becomes of an exception that nobody has caught."""
        if issubclass(kind, KeyboardInterrupt):
            self.leave(130, f"interrupted {self.where()}")
        if coordination.may_mean_a_loss(error):
            # It is soon known whether a process was lost; jax may end this one at once.
            time.sleep(1.5 * self._timeout)
            self._end_if_any_is_lost()
        sys.__excepthook__(kind, error, trace)
        reason = " ".join(f"{kind.__name__}: {error}".split())[:200]
        self.leave(CRASHED, f"this process crashed {self.where()} ({reason})", reason)

    def _aborted(self, _: int) -> None:
        """On SIGABRT, in whichever thread it is."""
        if not self.hosts:
            self._end(LOST, f"error: {self._not_joined}")
        self._end_if_any_is_lost()
        self._end(LOST, f"error: jax has ended this process, see above, {self.where()}")

    def _end_if_any_is_lost(self) -> None:
        """Ends this process if another one is lost, with its name."""
        lost = self._lost()
        if lost:
            were = "were" if len(lost) > 1 else "was"
            self._end(LOST, f"error: {self.names(lost)} {were} lost {self.where()}")

    def _lost(self) -> list[int]:
        """Those whose last sign of life is old; or process 0, if it does not answer."""
        me, old = coordination.process_id(), self._timeout / 3
        lost = self._silent_for(old)
        silent = time.monotonic() - self._looked > old
        if not lost and me != 0 and (silent or not coordination.is_coordinator_there()):
            return [0]
        return lost

    def _silent_for(self, seconds: float) -> list[int]:
        """The others that have not given a sign of life for so long and are not done."""
        others = set(coordination.members()) - {coordination.process_id()}
        return [
            process
            for process, (sign, changed) in sorted(self._seen.items())
            if self._looked - changed > seconds and process in others and sign != DONE
        ]

    def names(self, processes: Iterable[int]) -> str:
        """Processes as messages name them."""
        each = (f"process {i} (host {self.hosts[i]})" for i in sorted(processes))
        return " and ".join(each)

    def _end(self, status: int, line: str) -> NoReturn:
        """Ends the process without waiting for anything."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is about to
        os.write(2, f"{line}\n".encode())
        os._exit(status)
