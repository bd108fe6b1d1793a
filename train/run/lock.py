"""One process writes to a run folder: a lease in it that its holder keeps renewing.

It holds across hosts that share the folder. A process of the same host that has died holds
nothing; one of another host has lost the lease when another process has not seen it renewed
for `LEASE_S` of its own clock.
"""

import contextlib
import datetime
import os
import pathlib
import time
import weakref
from collections.abc import Callable

import filelock
from filelock import SoftFileLease


LOCK = "lock"
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
        _note_time(folder / LOCK)

    def check(self) -> None:
        """Calls `lost` at once if another process has taken the folder over.

        A process that was frozen goes on before it finds out in its other thread.
        """
        if self._lease.owner is not None and not self._lease.is_lock_held_by_us:
            self._lost(_taken_over(self._lease, self._folder))


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
        owner = lease.owner
        if owner is not None and not lease.is_lock_held_by_us:
            return lost(_taken_over(lease, folder))
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
    owner, since = lease.owner, _noted_time(folder / LOCK)
    if owner is None:
        return f"another process holds {folder}"
    host = owner.hostname.partition("?")[0]  # what follows tells containers apart
    return f"process {owner.pid} on host {host} holds {folder}{since}"


def _taken_over(lease: SoftFileLease, folder: pathlib.Path) -> str:
    return f"{_holder(lease, folder)}, which has taken it over"


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


def _note_time(path: pathlib.Path) -> None:
    """Adds to the lease since when it is held, in a line that filelock passes over."""
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    with contextlib.suppress(OSError), open(path, "a") as file:
        file.write(f"since={now}\n")


def _noted_time(path: pathlib.Path) -> str:
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError):
        return ""
    times = [line.removeprefix("since=") for line in lines if line.startswith("since=")]
    return f" since {times[0]}" if times else ""
