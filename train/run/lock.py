"""One process writes to a run folder: a lease in it that its holder keeps renewing.

It holds across hosts that share the folder. A process of the same host that has died holds
nothing; one of another host has lost the lease when another process has not seen it renewed
for `LEASE_S` of its own clock. The lease goes when a run ends; beside it the name of the
process that held the folder last stays, for a process that was frozen meanwhile.
"""

import contextlib
import datetime
import errno
import os
import pathlib
import secrets
import socket
import time
import weakref
from collections.abc import Callable

import filelock
from filelock import SoftFileLease


LOCK = "lock"
OWNER = "owner"  # who held the folder last, in three lines: name, time, token
TOKEN = secrets.token_hex(16)  # of this process
LEASE_S = 30.0  # the same for all: filelock refuses leases of another length
RENEWAL_S = 3.0

Say = Callable[[str], None]


class RunLock:
    """Holds a run folder: until it is released, or dropped, or the process ends.

    Args:
      folder: the run folder.
      say: called with a line if it takes time to find out whether another process holds
        the folder.
      lost: called with a line, in another thread, when another process has taken the folder
        over: then nothing may be written to it any more.

    Attributes:
      release: gives the folder back.

    Raises:
      ValueError: another process holds it; OSError: it cannot be written to.
    """

    def __init__(self, folder: pathlib.Path, say: Say, lost: Say):
        self._folder, self._lost = folder, lost
        self._lease = lease = SoftFileLease(
            folder / LOCK,
            lease_duration=LEASE_S,
            heartbeat_interval=RENEWAL_S,
            thread_local=False,
            on_compromise=lambda _: _find_out(lease, folder, lost),
        )
        _acquire(lease, folder, say)
        self.release = weakref.finalize(self, lease.release, force=True)

    def sign(self) -> None:
        """Notes in the folder that this process holds it; before others are written."""
        now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        name = f"process {os.getpid()} on host {socket.gethostname()}"
        new = self._folder / f"{OWNER}.{TOKEN}"
        new.write_text(f"{name}\n{now}\n{TOKEN}\n")
        new.replace(self._folder / OWNER)

    def check(self) -> None:
        """Calls `lost` at once if another process has taken the folder over.

        A process that was frozen goes on before it finds out in its other thread.

        Raises:
          OSError: the folder is not there, or another one has its name.
        """
        if line := _taken_over(self._lease, self._folder):
            self._lost(line)
        elif _owner(self._folder)[2:] != [TOKEN]:
            raise FileNotFoundError(
                errno.ENOENT, "the run folder is gone or was moved", str(self._folder)
            )


def _acquire(lease: SoftFileLease, folder: pathlib.Path, say: Say) -> None:
    """Takes the folder; ValueError if another process shows that it holds it."""
    with contextlib.suppress(filelock.Timeout):
        lease.acquire(blocking=False)
        return
    if not lease.is_lock_held_by_us:  # as that of an earlier run of this process
        before = _renewed(folder)
        lives = lambda: _renewed(folder) not in (None, before)
        for seconds in (2 * RENEWAL_S, LEASE_S):
            with contextlib.suppress(filelock.Timeout):
                lease.acquire(seconds, poll_interval=RENEWAL_S / 10, cancel_check=lives)
                return
            if lives():
                raise ValueError(f"{_holder(lease, folder)}; end it first, or let it end")
            if seconds < LEASE_S:
                line = f"{LEASE_S:.0f} s will show whether it still does"
                say(f"{_holder(lease, folder)}; {line}")
    # Where files cannot change places, as on NFS, filelock leaves an old lease in place.
    lease.force_break()
    try:
        lease.acquire(blocking=False)
    except filelock.Timeout:
        raise ValueError(_holder(lease, folder)) from None


def _find_out(lease: SoftFileLease, folder: pathlib.Path, lost: Say) -> None:
    """After a lease could not be renewed: watches what becomes of it.

    As long as no other process has taken it nothing is lost: the folder may be gone, or
    full, or read-only for a while.
    """
    unreadable_since = None
    while lease.is_locked:
        if line := _taken_over(lease, folder):
            return lost(line)
        owner = lease.owner
        if owner is not None:
            with contextlib.suppress(OSError):
                os.utime(folder / LOCK)
        now = time.monotonic()
        if owner is not None or _is_gone(folder):
            unreadable_since = None
        elif now - (unreadable_since := unreadable_since or now) > LEASE_S:
            return lost(f"{folder} has not been readable for {LEASE_S:.0f} s")
        time.sleep(RENEWAL_S)


def _holder(lease: SoftFileLease, folder: pathlib.Path) -> str:
    """Who holds the folder, and since when."""
    owner = lease.owner
    if owner is None:
        return f"another process holds {folder}"
    host = owner.hostname.partition("?")[0]  # what follows tells containers apart
    name, since, _ = _owner(folder) or ["", "", ""]
    when = f" since {since}" if name.startswith(f"process {owner.pid} ") else ""
    return f"process {owner.pid} on host {host} holds {folder}{when}"


def _taken_over(lease: SoftFileLease, folder: pathlib.Path) -> str:
    """Who has taken the folder over; nothing as long as no other process has."""
    if lease.owner is not None and not lease.is_lock_held_by_us:
        return f"{_holder(lease, folder)}, which has taken it over"
    owner = _owner(folder)
    if not owner or owner[2] == TOKEN:
        return ""
    return f"{owner[0]} took {folder} over at {owner[1]}, and has ended"


def _owner(folder: pathlib.Path) -> list[str]:
    """The name, the time and the token of who held the folder last; [] if unknown."""
    try:
        lines = (folder / OWNER).read_text().splitlines()
    except (OSError, ValueError):
        return []
    return lines if len(lines) == 3 else []


def _renewed(folder: pathlib.Path) -> tuple[int, int] | None:
    """Differs whenever the lease has been renewed or changed hands; None: unknown."""
    try:
        with open(folder / LOCK, "rb") as file:  # opening asks the server, stat may not
            found = os.fstat(file.fileno())
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _is_gone(folder: pathlib.Path) -> bool:
    try:
        os.stat(folder / LOCK)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
