"""Checksums of a checkpoint's files, which are part of it.

Orbax and TensorStore check their own indices: a byte that has changed in the file of an
array is not noticed, and another number comes back.
"""

import hashlib
import json
import pathlib
from concurrent.futures import ThreadPoolExecutor


CHECKSUMS = "sha256.json"
THREADS = 4  # to read with; hashing does not hold Python's lock

# Orbax writes these once the checksums are there, and takes no number of a state from them.
WITHOUT = {CHECKSUMS, "_CHECKPOINT_METADATA", "commit_success.txt"}


def write(folder: pathlib.Path) -> None:
    """Writes the checksums of all files in the folder of a checkpoint."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(THREADS) as threads:
        found = dict(zip(names, threads.map(_sha256, paths)))
    kept = {name: found[name] for name in names if name not in WITHOUT}
    (folder / CHECKSUMS).write_text(json.dumps(kept, indent=1))


def damage(folder: pathlib.Path, only: str = "") -> str:
    """What is wrong with the files of a checkpoint; nothing if they are as written.

    A checkpoint without checksums, from an earlier version, has nothing wrong with it.

    Args:
      folder: of the checkpoint.
      only: looks at this file alone.
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
