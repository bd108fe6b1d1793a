"""The folder of a run: a new one, or the one to resume. No file in it is overwritten."""

import contextlib
import os
import pathlib
import re
import time
from collections.abc import Set

from train.cluster import shared_folder
from train.cluster.session import Session
from train.config import settings
from train.config.schema import FREE_ON_RESUME, Config


CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
STAMP = "%Y%m%d-%H%M%S"  # in the name of a run folder


def newest(runs: str, name: str) -> pathlib.Path:
    """Returns the newest run folder whose config.json has this name.

    Raises:
      ValueError: there is none.
    """
    names = {path: _name_in(path) for path in pathlib.Path(runs).glob(f"*/{CONFIG}")}
    found = [path for path in names if names[path] == name]
    if not found:
        others = sorted({other for other in names.values() if other is not None})
        there = f" (there are runs named {', '.join(others)}: see --name)" if others else ""
        raise ValueError(
            f"there is no run of {name!r} in {runs!r} to resume{there}; name one with "
            "--run-dir"
        )
    return max(found, key=_began).parent


def _began(path: pathlib.Path) -> tuple[str, int, int]:
    """Sorts config.json files by the date in the folder's name, otherwise by file time.

    Copying a folder changes the file time.
    """
    changed = path.stat().st_mtime_ns
    if found := re.search(r"-(\d{8}-\d{6})(?:-(\d+))?$", path.parent.name):
        return found[1], int(found[2] or 1), changed
    return time.strftime(STAMP, time.localtime(changed / 1e9)), 0, changed


def _name_in(path: pathlib.Path) -> str | None:
    """The name of the run in a config.json, or None if it has none."""
    try:
        name = settings.read_some(path).get("name")
    except ValueError:
        return None  # --run-dir reports what is wrong with it
    return name if isinstance(name, str) else None


def to_resume(config: Config) -> pathlib.Path:
    """Returns the folder of the run to resume."""
    if config.run_dir is None:
        return newest(config.runs, config.name)
    folder = pathlib.Path(config.run_dir)
    check_utf8(folder)
    check_is_run(folder)
    return folder


def check_is_run(folder: pathlib.Path, file: str = CONFIG) -> None:
    """Raises ValueError if a folder is missing, or holds no such file of a run."""
    if not folder.is_dir():
        wrong = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} is no run folder: it {wrong}")
    if not (folder / file).exists():
        raise ValueError(f"{folder} is no run folder: it holds no {file}")


def check_utf8(folder: pathlib.Path) -> None:
    """Raises ValueError if the path is not UTF-8, which checkpoints need."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the path of a run folder must be UTF-8, got {os.fsencode(folder.absolute())}"
        ) from None


def check_same_experiment(
    config: Config, folder: pathlib.Path, free: Set[str] = FREE_ON_RESUME
) -> None:
    """Raises ValueError if a run folder has another configuration, naming the differences.

    Args:
      config: the configuration.
      folder: the run folder.
      free: settings that may differ.
    """
    changes = settings.differences(settings.read(folder / CONFIG), config, free)
    if changes:
        raise ValueError(
            f"{folder} is a run of another configuration: {'; '.join(changes)}"
        )


def unused(wanted: pathlib.Path) -> pathlib.Path:
    """Returns PATH, or the first of PATH-2, PATH-3, … that does not exist."""
    path, count = wanted, 1
    while path.exists():
        count += 1
        path = wanted.with_name(f"{wanted.name}-{count}")
    return path


def taken(path: pathlib.Path) -> bool:
    """Whether a path exists and is not an empty folder."""
    if not path.is_dir():
        return path.exists()
    # A file system of its own has this folder from the start.
    return any(entry.name != "lost+found" for entry in path.iterdir())


def choose(config: Config) -> pathlib.Path:
    """Returns the folder of a run that is about to start or resume. Creates nothing.

    Raises:
      ValueError: a new run would use a folder that exists, or a path that is not UTF-8.
    """
    if config.resume:
        return to_resume(config)
    stamp = time.strftime(STAMP)
    own = pathlib.Path(config.runs) / f"{config.name}-{stamp}"
    folder = unused(own) if config.run_dir is None else pathlib.Path(config.run_dir)
    check_utf8(folder)
    if taken(folder):
        raise taken_error(folder)
    return folder


def create(config: Config, session: Session) -> pathlib.Path:
    """Creates the folder of a new run with its config.json; the same in all processes.

    Raises:
      ValueError: --run-dir exists and is not an empty folder, or the folder cannot be
        created or is not shared by all processes. Nothing of it is left behind.
    """
    folder = pathlib.Path(session.of_main(lambda: str(_make(config))))
    try:
        shared_folder.check(session, folder)
    except ValueError:
        if session.is_main:
            _remove(folder)
        raise
    return folder


def _make(config: Config) -> pathlib.Path:
    folder = pathlib.Path(config.run_dir or config.runs)  # until it is chosen
    try:
        folder = choose(config)
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(config, folder)
    except FileExistsError:
        if config.run_dir is None and folder.is_dir():
            return _make(config)  # another run that started now took this name
        raise taken_error(folder) from None
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"the run folder {folder} cannot be made: {reason}") from error
    return folder


def _write_config(config: Config, folder: pathlib.Path) -> None:
    """Writes config.json. Removes the folder if this fails."""
    try:
        settings.write(config, folder / CONFIG)
    except FileExistsError:
        raise
    except OSError:
        _remove(folder)
        raise


def _remove(folder: pathlib.Path) -> None:
    """Removes the folder of a run that has not begun."""
    with contextlib.suppress(OSError):
        (folder / CONFIG).unlink(missing_ok=True)
        folder.rmdir()


def taken_error(folder: pathlib.Path) -> ValueError:
    """The error of a new run whose folder exists."""
    return ValueError(
        f"`run_dir` must be a new folder, but {folder} exists; add --resume to resume the "
        "run in it"
    )
