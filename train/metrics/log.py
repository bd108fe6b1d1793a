"""metrics.jsonl and TensorBoard's files: written while training, read for figures."""

import errno
import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from train.metrics.tensorboard import EventFiles


METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsLog:
    """Writes one JSON line per event, and its scalars as TensorBoard events.

    A line has the kind ('start', 'resized', 'train', 'leaders', 'test', 'warning', 'end'),
    the step and the seconds of training so far. Numbers that are not finite become null.

    Args:
      folder: the run folder; lines are appended to an existing file.
      warn: called once if the log cannot be written (a full disk, for example). Training
        continues.
      write: whether this process writes; one process of a run does.
      check: called before each event. Raises OSError if the folder is gone, and does not
        return if another run has taken it over.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        warn: Callable[[str], None],
        write: bool = True,
        check: Callable[[], None] = lambda: None,
    ):
        self._warn, self._warned, self._writes = warn, False, write
        self._check = check
        self._path = folder / METRICS
        self._event_files = EventFiles(folder / TENSORBOARD)
        self._ends_with_a_line = False

    def write(self, kind: str, step: int, seconds: float, **values: Any) -> None:
        """Writes one event."""
        if not self._writes:
            return
        line = {"kind": kind, "step": step, "seconds": round(seconds, 3), **values}
        scalars = {
            f"{kind}/{name}": value
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        try:
            self._check()
            self._end_a_cut_off_line()
            self._append(json.dumps(_jsonable(line)) + "\n")
            self._event_files.add(step, scalars)
        except OSError as error:
            self._fail(error)

    def _end_a_cut_off_line(self) -> None:
        """Ends a last line that a crash cut off, so that the next one is whole."""
        if not self._ends_with_a_line and self._path.exists():
            if self._path.read_bytes()[-1:] not in (b"\n", b""):
                self._append("\n")
        self._ends_with_a_line = True

    def _append(self, text: str) -> None:
        with open(self._path, "a") as file:
            file.write(text)

    def _fail(self, error: OSError) -> None:
        if not self._warned:
            self._warn(f"metrics cannot be written any more: {error}")
            self._warned = True

    @property
    def is_whole(self) -> bool:
        """Whether every event was written."""
        return not self._warned

    def close(self) -> None:
        """Flushes and closes TensorBoard's file."""
        try:
            self._event_files.close()
        except OSError as error:
            self._fail(error)


def read(folder: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the events of a run by kind, in order.

    If a run was resumed, events of the session before that lie behind the step of resuming
    are left out. Lines that a crash cut off, or that are damaged, are skipped.

    Raises:
      OSError: the file does not exist or cannot be read.
    """
    events: list[dict[str, Any]] = []
    for event in _lines(folder / METRICS):
        if event["kind"] == "start":
            events = [old for old in events if old["step"] <= event["step"]]
        events.append(event)
    kinds: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        kinds.setdefault(event["kind"], []).append(event)
    return kinds


def _lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    if path.exists() and not path.is_file():  # a pipe would block
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    for line in path.read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and _is_sound(event):
            yield event


def _is_sound(event: dict[str, Any]) -> bool:
    """Whether an event has a kind, a step and seconds."""
    kind, step, seconds = (event.get(name) for name in ("kind", "step", "seconds"))
    return type(kind) is str and type(step) is int and type(seconds) in (int, float)


def _jsonable(value: Any) -> Any:
    """The value with None in place of numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
