"""Heartbeats tell which of several processes still live, failure notices why one does not.

When a process is lost, jax's coordination service notices after the heartbeat timeout (at
once if it was process 0, which is the service) and ends the others. jax does not say which
one it was; the heartbeats that the processes leave at the service do. A process that fails
by itself leaves a failure notice, and the others end at once.

A process whose main thread hangs still gives heartbeats. With them it says how far it is,
and one that the others wait for in vain (see `train.cluster.standstill`) ends itself where
losses are survived: to the others that is a loss. Where they are not, all end.
"""

import atexit
import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jax

from train.cluster import network
from train.cluster.ending import Ending
from train.cluster.exit_status import CRASHED, INTERRUPTED, LOST
from train.cluster.lost import Late, may_mean_a_loss
from train.cluster.session import ASKING, ASKS, Session
from train.cluster.standstill import Hung, Standstill
from train.cluster.work import Report


FOLDER = "heartbeat"  # of each process: a count, DONE, or its failure notice [status, line]
DONE = "done"
LAST_S = 60.0  # for the others to end in, before process 0 does
WORK = "work"  # of each process: the report of its work
CONNECTIONS = "connections"  # of each process: those to others


class Heartbeat:
    """Gives this process's heartbeats and watches the others'.

    Args:
      session: whose members to watch.
      ending: how this process ends because of another one.
      timeout: seconds without a heartbeat that mean a loss.
      survive: whether jax lets the others live, which then are told of a loss here.
      progress_timeout: see `Standstill`.
    """

    def __init__(
        self,
        session: Session,
        ending: Ending,
        timeout: float,
        survive: bool,
        progress_timeout: int | None = None,
    ):
        self._session, self._ending = session, ending
        self._timeout, self._survive = timeout, survive
        self._progress_timeout = progress_timeout
        self._standstills: dict[str, Standstill] = {}  # of each group of members
        self._connections = ""  # as they were last left for the others
        self._seen: dict[int, tuple[str, float]] = {}  # heartbeat, when it last changed
        # Groups of members that wait for one another no longer, and since when.
        self._gave_up_at: dict[str, float] = {}
        self._looked = time.monotonic()
        self._done = threading.Event()
        self._writing = threading.Lock()  # held while one is left; after the last, too
        ending.on_abort = self._on_abort

    def begin(self) -> None:
        """Begins to watch, until the process ends."""
        sys.excepthook = self._crashed
        thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        thread.start()
        atexit.register(self._finish, thread)

    def _finish(self, thread: threading.Thread) -> None:
        """Ends the watch at exit, just before jax leaves the others."""
        self._done.set()
        thread.join(self._period)
        self._writing.acquire()
        with contextlib.suppress(jax.errors.JaxRuntimeError, TimeoutError):
            self._session.write(FOLDER, DONE)
            # Where losses are survived jax does not let process 0 wait for the others, who
            # need it even to leave. It may leave when it is the only one that lives.
            if self._survive and self._session.is_main:
                others = len(self._session.members) - 1
                deadline = time.monotonic() + LAST_S
                while time.monotonic() < deadline:
                    if len(self._session.lost_members(LAST_S)) >= others:
                        break

    @property
    def _period(self) -> float:
        return min(1.0, self._timeout / 10)

    def _watch(self) -> None:
        """Gives heartbeats and looks for the others', until the process is done."""
        session = self._session
        for count in itertools.count():
            # Without the service jax will soon end this process.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                with self._writing:
                    session.write(FOLDER, str(count))
                found = session.read(FOLDER)
                self._looked = time.monotonic()
                for process, text in found.items():
                    if self._seen.get(process, ("", 0.0))[0] != text:
                        self._seen[process] = text, self._looked
                    if text.startswith("[") and process != session.process_id:
                        self._follow(process, *json.loads(text))
                self._look_for_standstill(found)
                if self._survive:
                    self._leave_connections()
            if self._survive:
                self._let_go(self._silent_for(self._timeout))
            if self._done.wait(self._period):
                return

    def _leave_connections(self) -> None:
        """Leaves this process's connections for the others, in case one is lost."""
        session = self._session
        connections = json.dumps(network.connections(session.service_port()))
        if connections != self._connections:
            self._connections = connections
            session.write_for_all(CONNECTIONS, connections)

    def _let_go(self, silent: list[int]) -> None:
        """Notes that processes are lost; no operation waits here for any process then.

        The system tells that a process has ended, but not that a host is without power or
        cut off. And a collective that one process has given up because of a loss others
        still wait in, for that process.
        """
        self._session.note_lost(silent)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self._session.lost or self._session.read(ASKS):
                self._give_up()

    def _give_up(self) -> None:
        """Has all operations fail that wait for other members of the group.

        If that is not enough for the main thread to learn of it, also those among devices
        of this process.
        """
        group, now = self._session.group, time.monotonic()
        is_new = group not in self._gave_up_at
        since = now - self._gave_up_at.setdefault(group, now)
        is_stuck = since > self._timeout / 2 and self._session.work.doing != ASKING
        if not is_new and not is_stuck:
            return
        theirs = self._session.read_for_all(CONNECTIONS)
        theirs.pop(self._session.process_id, None)
        for text in theirs.values():
            network.cut(json.loads(text))
        if is_stuck:
            self._session.connections.let_go(all=since > self._timeout)

    def _look_for_standstill(self, heartbeats: Mapping[int, str]) -> None:
        """Ends what a process that hangs has to do with: itself, or all."""
        session = self._session
        session.write(WORK, session.work.report())
        takes_part = {i for i, text in heartbeats.items() if text != DONE}
        takes_part &= set(session.members) - session.lost
        reports = {
            process: Report.read(text)
            for process, text in session.read(WORK).items()
            if process in takes_part
        }
        watch = self._standstills.setdefault(
            session.group, Standstill(self._progress_timeout)
        )
        hung = watch.look(reports, session.stopping)
        if hung is None:
            return
        line = self._what_hangs(hung)
        spared = self._survive and not hung.all and 0 not in hung.processes
        spared &= hung.seconds < 2 * hung.limit  # or it cannot even end itself
        if not spared:
            self.leave(LOST, f"{line} {session.where()}", line)
        # The others give up first. Otherwise the end of this process would break one of the
        # collectives in flight, and gloo aborts on what the next one sends.
        if session.process_id not in hung.processes:
            self._give_up()
        elif hung.seconds > hung.limit + 3 * self._period:
            self._ending.end(LOST, f"error: {line}; this process ends, the others go on")

    def _what_hangs(self, hung: Hung) -> str:
        """Which processes hang, in what, and for how long."""
        each = [
            f"{self._session.names([i])}, pid {report.pid}, {report.doing},"
            for i, report in zip(hung.processes, hung.reports)
        ]
        verb = "has" if len(each) == 1 else "have"
        return (
            f"{' and '.join(each)} {verb} made no progress for {hung.seconds:.0f} s (the "
            f"limit is {hung.limit:.0f} s, see --distributed.progress-timeout)"
        )

    def _follow(self, process: int, status: int, line: str) -> NoReturn:
        """Ends this process because another one has left a failure notice."""
        name, where = self._session.names([process]), self._session.where
        if status == LOST and "to go on" not in line:
            line = f"{line} {where()}"
        if status != CRASHED:
            self._ending.end(status, f"error: {name}: {line}")
        self._ending.end(LOST, f"error: {name} crashed {where()} ({line})")

    def leave(self, status: int, line: str, notice: str | None = None) -> NoReturn:
        """Ends this process with a last line, all others with a notice (or that line)."""
        self._writing.acquire()  # no heartbeat must take the place of the failure notice
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            text = json.dumps([status, line if notice is None else notice])
            self._session.write(FOLDER, text)
            if self._session.is_main:
                time.sleep(3 * self._period)  # until all have read it: here it is kept
        self._ending.end(status, line if status == INTERRUPTED else f"error: {line}")

    def _crashed(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """What becomes of an exception that nothing has caught."""
        where = self._session.where
        if issubclass(kind, KeyboardInterrupt):
            self.leave(INTERRUPTED, f"interrupted {where()}")
        if isinstance(error, Late):
            self.leave(LOST, f"{error} {where()}", str(error))
        if may_mean_a_loss(error):
            # It is soon known whether a process was lost; jax may end this one at once.
            time.sleep(1.5 * self._timeout)
            if line := self._who_is_lost():
                self._ending.end(LOST, f"error: {line}")
        sys.__excepthook__(kind, error, trace)
        reason = " ".join(f"{kind.__name__}: {error}".split())[:200]
        self.leave(CRASHED, f"this process crashed {where()} ({reason})", reason)

    def _on_abort(self) -> str:
        """The last line when jax ends this process."""
        time.sleep(2 * self._period)  # a failure notice may say why; it ends this process
        by_jax = f"jax has ended this process, see above, {self._session.where()}"
        return self._who_is_lost() or by_jax

    def _who_is_lost(self) -> str:
        """That another process is lost, by its name; '' if none is."""
        lost = self._lost()
        were = "were" if len(lost) > 1 else "was"
        names, where = self._session.names(lost), self._session.where
        return f"{names} {were} lost {where()}" if lost else ""

    def _lost(self) -> list[int]:
        """Those whose last heartbeat is old; or process 0, if it does not answer."""
        old = self._timeout / 3
        lost = self._silent_for(old)
        silent = time.monotonic() - self._looked > old
        if lost or self._session.is_main:
            return lost
        return [0] if silent or not self._session.is_service_there() else []

    def _silent_for(self, seconds: float) -> list[int]:
        """The others that have given no heartbeat for so long and are not done."""
        others = set(self._session.members) - {self._session.process_id}
        return [
            process
            for process, (text, changed) in sorted(self._seen.items())
            if self._looked - changed > seconds and process in others and text != DONE
        ]
