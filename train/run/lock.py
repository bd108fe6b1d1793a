"""The lock of a run folder: a lease file that its holder keeps renewing.

The lease works across hosts that share the folder. On the same host, a process that has
died holds nothing. On another host, a process loses the lease if a waiting process does not
see it renewed for `LEASE_S` of its own clock. The lease file is removed when a run ends.
The file `OWNER` stays and names the last holder, so that a process that was frozen
meanwhile finds out.
"""

import contextlib
import datetime
import errno
import os
import pathlib
import secrets
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

import filelock
from filelock import SoftFileLease


LOCK = "lock"
OWNER = "owner"  # the last holder in three lines: name, time, token
TOKEN = secrets.token_hex(16)  # identifies this process
LEASE_S = 30.0  # a constant, because filelock refuses leases of different lengths
RENEWAL_S = 3.0

Say = Callable[[str], None]


class RunLock:
    """Holds a run folder until it is released or dropped, or the process ends.

    Args:
      folder: the run folder.
      say: called with a line if it takes time to find out whether another process holds
        the folder.
      lost: called with a line, in another thread, when another process has taken the folder
        over. Nothing may be written to it from then on.

    Attributes:
      release: gives the folder back. Where the lease file cannot be removed (on a file
        system that is read-only by now, for example), it stays and expires.

    Raises:
      ValueError: another process holds the folder.
      OSError: the folder cannot be written to.
    """

    def __init__(self, folder: pathlib.Path, say: Say, lost: Say):
        self._folder = folder
        self._lost = lost
        released = threading.Event()

        def keep_renewing(_: object) -> None:
            _keep_renewing(lease, folder, lost, released)

        self._lease = lease = _lease(folder, on_compromise=keep_renewing)
        _acquire(lease, folder, say)
        self.release = weakref.finalize(self, _release, lease, released)

    def sign(self) -> None:
        """Writes into the folder that this process holds it."""
        now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        name = f"process {os.getpid()} on host {socket.gethostname()}"
        new = self._folder / f"{OWNER}.{TOKEN}"
        new.write_text(f"{name}\n{now}\n{TOKEN}\n")
        new.replace(self._folder / OWNER)

    def check(self) -> None:
        """Calls `lost` if another process has taken the folder over.

        A process that was frozen may write again before its other thread finds out.

        Raises:
          OSError: the folder is gone, or another folder has its name.
        """
        line = _taken_over(self._lease, self._folder)
        if line:
            self._lost(line)
        elif _owner(self._folder)[2:] != [TOKEN]:
            raise FileNotFoundError(
                errno.ENOENT, "the run folder is gone or was moved", str(self._folder)
            )


def remove_left(folder: pathlib.Path, patience: float) -> None:
    """Removes the lock of a process of this host that was killed.

    Args:
      folder: the run folder.
      patience: seconds within which the process may still end.
    """
    if (folder / LOCK).exists():
        lease = _lease(folder)
        with contextlib.suppress(filelock.Timeout, OSError):
            lease.acquire(patience)
            lease.release(force=True)


def _lease(folder: pathlib.Path, **options: Any) -> SoftFileLease:
    return SoftFileLease(
        folder / LOCK,
        lease_duration=LEASE_S,
        heartbeat_interval=RENEWAL_S,
        thread_local=False,
        **options,
    )


def _acquire(lease: SoftFileLease, folder: pathlib.Path, say: Say) -> None:
    """Acquires the lease.

    Raises:
      ValueError: another process is seen to renew it.
      OSError: the folder cannot be written to.
    """
    with contextlib.suppress(filelock.Timeout):
        lease.acquire(blocking=False)
        return
    # A lease that a dead process left on a read-only file system cannot be broken. The file
    # system is the reason then, and not the process.
    _check_writable(folder)
    if not lease.is_lock_held_by_us:  # an earlier run of this process may hold it
        before = _renewed(folder)

        def lives():
            return _renewed(folder) not in (None, before)

        for seconds in (2 * RENEWAL_S, LEASE_S):
            with contextlib.suppress(filelock.Timeout):
                lease.acquire(seconds, poll_interval=RENEWAL_S / 10, cancel_check=lives)
                return
            if lives():
                raise ValueError(f"{_holder(lease, folder)}; end it first, or let it end")
            if seconds < LEASE_S:
                line = f"{LEASE_S:.0f} s will show whether it still does"
                say(f"{_holder(lease, folder)}; {line}")
    # Where files cannot be exchanged, as on NFS, filelock leaves an expired lease in place.
    lease.force_break()
    try:
        lease.acquire(blocking=False)
    except filelock.Timeout:
        raise ValueError(_holder(lease, folder)) from None


def _check_writable(folder: pathlib.Path) -> None:
    """Raises OSError if no file can be created in a folder."""
    probe = folder / f"{LOCK}.{TOKEN}"
    probe.touch()
    probe.unlink()


def _release(lease: SoftFileLease, released: threading.Event) -> None:
    """Releases a lease. Its process ends, or goes on with another run, in any case."""
    released.set()
    with contextlib.suppress(OSError):
        lease.release(force=True)


def _keep_renewing(
    lease: SoftFileLease, folder: pathlib.Path, lost: Say, released: threading.Event
) -> None:
    """Renews a lease in place of filelock, which stops doing so at the first failure.

    The folder may be gone, full, read-only or unreadable for a while. It is lost only if
    another process takes it over.
    """
    while lease.is_locked and not released.is_set():
        line = _taken_over(lease, folder)
        if line:
            return lost(line)
        if lease.owner is not None:
            with contextlib.suppress(OSError):
                os.utime(folder / LOCK)
        released.wait(RENEWAL_S)


def _holder(lease: SoftFileLease, folder: pathlib.Path) -> str:
    """Says which process holds the folder, and since when."""
    owner = lease.owner
    if owner is None:
        return f"another process holds {folder}"
    host = owner.hostname.partition("?")[0]  # the rest tells containers apart
    name, since, _ = _owner(folder) or ["", "", ""]
    when = f" since {since}" if name.startswith(f"process {owner.pid} ") else ""
    return f"process {owner.pid} on host {host} holds {folder}{when}"


def _taken_over(lease: SoftFileLease, folder: pathlib.Path) -> str:
    """Says which process has taken the folder over, or ''."""
    if lease.owner is not None and not lease.is_lock_held_by_us:
        return f"{_holder(lease, folder)}, which has taken it over"
    owner = _owner(folder)
    if not owner or owner[2] == TOKEN:
        return ""
    return f"{owner[0]} took {folder} over at {owner[1]}, and has ended"


def _owner(folder: pathlib.Path) -> list[str]:
    """The name, time and token of the last holder, or [] if they cannot be read."""
    try:
        lines = (folder / OWNER).read_text().splitlines()
    except (OSError, ValueError):
        return []
    return lines if len(lines) == 3 else []


def _renewed(folder: pathlib.Path) -> tuple[int, int] | None:
    """Changes whenever the lease is renewed or changes hands; None if it is unreadable."""
    try:
        with open(folder / LOCK, "rb") as file:  # opening asks the server, stat may not
            found = os.fstat(file.fileno())
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
