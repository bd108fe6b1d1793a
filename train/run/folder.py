"""The folder of a run: a new one, or the one to resume. No file in it is overwritten."""

import calendar
import contextlib
import math
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
OF_PROCESS = "process-"  # begins the name of the folder of a process that may be lost
CHECKPOINTS = "checkpoints"
STAMP = "%Y%m%d-%H%M%SZ"  # in the name of a run folder; Z: in UTC, as on all hosts


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


def _began(path: pathlib.Path) -> tuple[float, int, float]:
    """Sorts config.json files by when their runs began.

    The date in the folder's name counts, because copying a folder changes the time of the
    file. A folder with another name is sorted by the time of the file.

    Returns:
      Seconds since 1970, the number that ends the name, and the time of the file.
    """
    changed = path.stat().st_mtime
    found = re.search(r"-(\d{8}-\d{6}Z?)(?:-(\d+))?$", path.parent.name)
    began = None if found is None else _seconds(found[1])
    if found is None or began is None:
        return changed, 0, changed
    return began, int(found[2] or 1), changed


def _seconds(stamp: str) -> float | None:
    """Seconds since 1970 of the date in a run folder's name, or None if it is no date.

    >>> _seconds("19700102-000001Z"), _seconds("20261399-000000Z")
    (86401, None)
    """
    try:
        if stamp.endswith("Z"):
            return calendar.timegm(time.strptime(stamp, STAMP))
        return time.mktime(time.strptime(f"{stamp}Z", STAMP))  # 0.3 wrote local time
    except (ValueError, OverflowError):
        return None


def _stamp(config: Config) -> str:
    """The date in the name of a new run: now, or a second after the newest run of its name.

    The clock may have been set back, or a host whose clock is fast may share the folder.
    """
    now = latest = time.time()
    for path in pathlib.Path(config.runs).glob(f"*/{CONFIG}"):
        with contextlib.suppress(OSError):  # it is being removed
            began, *_ = _began(path)
            if began > latest and _name_in(path) == config.name:
                latest = began
    if latest > now:
        latest = math.floor(latest) + 1
    return time.strftime(STAMP, time.gmtime(latest))


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
    path = wanted
    count = 1
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
    if config.run_dir is None:
        folder = unused(pathlib.Path(config.runs) / f"{config.name}-{_stamp(config)}")
    else:
        folder = pathlib.Path(config.run_dir)
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


def of_process(config: Config, process_id: int, main: pathlib.Path) -> pathlib.Path:
    """Returns the folder of another process than process 0, where processes may be lost.

    It is made unless it is there. On a file system of its own, so is that of process 0.

    Args:
      config: the configuration.
      process_id: the number of the process.
      main: the folder of process 0.

    Raises:
      ValueError: it cannot be made.
    """
    own = main / f"{OF_PROCESS}{process_id}"
    try:
        own.mkdir(parents=True, exist_ok=True)
        for folder in (main, own):  # a resumption reads the first one before it begins
            if not (folder / CONFIG).exists():
                settings.write(config, folder / CONFIG)
    except OSError as error:
        raise ValueError(f"{own} cannot be made: {error.strerror or error}") from error
    return own


def of_all(config: Config, folder: pathlib.Path) -> pathlib.Path:
    """The folder of the run, of which this one may be that of a process."""
    is_own = config.min_workers is not None and folder.name.startswith(OF_PROCESS)
    return folder.parent if is_own else folder


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
