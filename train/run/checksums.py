"""Checksums of a checkpoint's files, saved with it.

Orbax and TensorStore check only their own indices. A changed byte in an array's file would
go unnoticed and restore another number.
"""

import hashlib
import json
import pathlib
from concurrent.futures import ThreadPoolExecutor


CHECKSUMS = "sha256.json"
THREADS = 4  # read and hash files; hashing releases the GIL

# Orbax writes these after the checksums, and reads no number of a state from them.
WITHOUT = {CHECKSUMS, "_CHECKPOINT_METADATA", "commit_success.txt"}


def write(folder: pathlib.Path) -> None:
    """Writes the checksums of all files of a checkpoint."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(THREADS) as threads:
        found = dict(zip(names, threads.map(_sha256, paths)))
    kept = {name: found[name] for name in names if name not in WITHOUT}
    (folder / CHECKSUMS).write_text(json.dumps(kept, indent=1))


def damage(folder: pathlib.Path, only: str = "") -> str:
    """Returns how a checkpoint's files differ from those that were written, or ''.

    A checkpoint of an earlier version has no checksums, and '' is returned.

    Args:
      folder: the folder of the checkpoint.
      only: the one file to check. Defaults to all.
    """
    try:
        text = (folder / CHECKSUMS).read_text()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"{CHECKSUMS} cannot be read: {error}"
    try:
        expected = dict(json.loads(text))
    except (TypeError, ValueError):
        return f"{CHECKSUMS} is not as it was written"
    names = [only] if only else list(expected) or [CHECKSUMS]
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda name: _look(folder / name, expected.get(name)), names)
        return next((f"{name} {what}" for name, what in zip(names, found) if what), "")


def are_there(folder: pathlib.Path) -> bool:
    """Whether a checkpoint has checksums."""
    return (folder / CHECKSUMS).exists()


def _look(path: pathlib.Path, expected: str | None) -> str:
    try:
        return "" if _sha256(path) == expected else "is not as it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
