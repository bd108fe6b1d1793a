"""Checks that all processes see the same folder, on a shared file system."""

import os
import pathlib
import secrets
import time

from train.cluster.session import Session


PATIENCE_S = 20.0  # network file systems show new files late


def check(session: Session, folder: pathlib.Path) -> None:
    """Raises ValueError in all processes unless each sees a file that the main one writes.

    Args:
      session: the processes.
      folder: the folder, which must exist on the host of the main process.
    """
    if not session.has_others:
        return
    name = session.agree(f".seen-by-all-{secrets.token_hex(8)}")
    if session.is_main:
        (folder / name).touch()
    session.wait_for_all()
    sees = session.gather(str(_appears(folder, name)))
    if session.is_main:
        (folder / name).unlink(missing_ok=True)
    blind = " and ".join(
        f"process {i} (host {session.hosts[i]})"
        for i, seen in enumerate(sees)
        if seen != str(True)
    )
    if blind:
        raise ValueError(
            f"all processes must see the run folder {folder.absolute()} of process 0 (host "
            f"{session.hosts[0]}), but {blind} cannot: name one on a file system that they "
            "share, with --run-dir or --runs"
        )


def _appears(folder: pathlib.Path, name: str) -> bool:
    """Waits for a file to appear. Returns whether it did."""
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            return False
        for path in (folder.parent, folder):  # makes NFS look again
            if path.is_dir():
                os.listdir(path)
        time.sleep(0.1)
    return True
