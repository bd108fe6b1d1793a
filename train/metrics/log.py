"""The events of a run: written to trackers while training, read for figures."""

import errno
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from train.metrics.tensorboard import TensorBoard
from train.metrics.trackers import Event, JsonLines, Tracker


METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsLog:
    """Writes the events of a run to its trackers: metrics.jsonl, TensorBoard, and others.

    An event has the kind ('start', 'resized', 'train', 'leaders', 'test', 'warning',
    'end'), the step and the seconds of training so far.

    Args:
      folder: the run folder; lines are appended to an existing file.
      warn: called once if the log cannot be written (a full disk, for example). Training
        continues.
      write: whether this process writes; one process of a run does.
      check: called before each event. Raises OSError if the folder is gone, and does not
        return if another run has taken it over.
      others: further trackers.

    Attributes:
      latest: the latest event of each kind in this session.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        warn: Callable[[str], None],
        write: bool = True,
        check: Callable[[], None] = lambda: None,
        others: Sequence[Tracker] = (),
    ):
        self._warn = warn
        self._warned = False
        self._check = check
        self.latest: dict[str, Event] = {}
        own = JsonLines(folder / METRICS), TensorBoard(folder / TENSORBOARD)
        self._trackers = (*own, *others) if write else ()

    def write(self, kind: str, step: int, seconds: float, **values: Any) -> None:
        """Writes one event."""
        event = {"kind": kind, "step": step, "seconds": round(seconds, 3), **values}
        self.latest[kind] = event
        if self._trackers and self._attempt(self._check):
            for tracker in self._trackers:
                self._attempt(functools.partial(tracker.write, event))

    def _attempt(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except OSError as error:
            if not self._warned:
                self._warn(f"metrics cannot be written any more: {error}")
                self._warned = True
            return False
        return True

    @property
    def is_whole(self) -> bool:
        """Whether every event was written."""
        return not self._warned

    def close(self) -> None:
        """Flushes and closes the trackers."""
        for tracker in self._trackers:
            self._attempt(tracker.close)


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


def last_steps(folder: pathlib.Path) -> dict[str, int]:
    """The last step of each kind of event in metrics.jsonl, and {} without this file.

    Events that `read` leaves out count, too.

    Raises:
      OSError: the file cannot be read.
    """
    last: dict[str, int] = {}
    if not (folder / METRICS).exists():
        return last
    for event in _lines(folder / METRICS):
        last[event["kind"]] = max(event["step"], last.get(event["kind"], 0))
    return last


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
