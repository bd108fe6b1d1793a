"""Trackers: the places to which the events of a run go while it trains."""

import importlib
import json
import math
import pathlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from train.process.messages import one_line


Event = Mapping[str, Any]  # with a kind, a step and seconds of training


class Tracker(Protocol):
    """Receives the events of a run. The methods raise OSError if one cannot be written."""

    def write(self, event: Event) -> None:
        """Writes one event."""
        ...

    def close(self) -> None:
        """Writes what is buffered."""
        ...


def scalars(event: Event) -> dict[str, float]:
    """The finite numbers of an event, by kind and name.

    >>> scalars({"kind": "train", "step": 2, "seconds": 0.5, "loss": 0.1, "pulls": []})
    {'train/loss': 0.1}
    """
    return {
        f"{event['kind']}/{name}": value
        for name, value in event.items()
        if name not in ("kind", "step", "seconds")
        if isinstance(value, int | float) and math.isfinite(value)
    }


class JsonLines:
    """Writes each event as a line of JSON. Numbers that are not finite become null.

    Args:
      path: the file; lines are appended to an existing one.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._ends_with_a_line = False

    def write(self, event: Event) -> None:
        self._end_a_cut_off_line()
        self._ends_with_a_line = False  # a full disk cuts the line off, and may get space
        self._append(json.dumps(_jsonable(event)) + "\n")
        self._ends_with_a_line = True

    def close(self) -> None:
        pass

    def _end_a_cut_off_line(self) -> None:
        """Ends a last line that a crash or a full disk cut off."""
        if not self._ends_with_a_line and self._path.exists():
            if self._path.read_bytes()[-1:] not in (b"\n", b""):
                self._append("\n")

    def _append(self, text: str) -> None:
        with open(self._path, "a") as file:
            file.write(text)


Opened = tuple[Any, Callable[[Mapping[str, float], int], None]]  # a run, and its log


def _wandb(init: Any, kept: pathlib.Path, name: str, project: str, **given: Any) -> Opened:
    team, _, own = project.rpartition("/")
    where = {"entity": team or None, "project": own}
    run = init(name=name, id=_kept_id(kept), dir=str(kept.parent), **where, **given)
    # Its own steps only grow, and events of one step would collide.
    return run, lambda sent, step: run.log({**sent, "step": step})


def _trackio(init: Any, kept: pathlib.Path, name: str, **given: Any) -> Opened:
    run = init(name=_kept_id(kept, f"{name}-"), **given)  # found by its name, without an id
    return run, lambda sent, step: run.log(sent, step=step)


# The name of each service, and the function that opens a run, by package.
SERVICES = {"wandb": ("Weights & Biases", _wandb), "trackio": ("trackio", _trackio)}


class Service:
    """Sends the scalars of events to one of `SERVICES`.

    Training does not depend on it: an error is a warning, and the last one.

    Args:
      package: a key of `SERVICES`.
      project: the project; for Weights & Biases also TEAM/PROJECT.
      folder: the run folder. It keeps the id of the run of the project, which a resumed run
        continues.
      settings: the settings of the run.
      written: the last step of each kind of event in metrics.jsonl. If the folder has an
        id, events up to these steps were sent before, and are not sent again.
      warn: called once with one line if something cannot be sent.
    """

    def __init__(
        self,
        package: str,
        project: str,
        folder: pathlib.Path,
        settings: Mapping[str, Any],
        written: Mapping[str, int],
        warn: Callable[[str], None],
    ):
        self._name = SERVICES[package][0]
        self._warn = warn
        self._run = None
        kept = folder / f"{package}_id.txt"
        self._sent = written if kept.exists() else {}
        given = {"project": project, "config": dict(settings), "resume": "allow"}
        self._attempt(lambda: self._open(package, kept, folder.name, given))

    def _open(self, package: str, kept: pathlib.Path, name: str, given: Any) -> None:
        init = importlib.import_module(package).init
        self._run, self._log = SERVICES[package][1](init, kept, name, **given)

    def write(self, event: Event) -> None:
        sent = scalars(event)
        step = event["step"]
        if self._run is not None and sent and step > self._sent.get(event["kind"], -1):
            self._attempt(lambda: self._log({**sent, "seconds": event["seconds"]}, step))

    def close(self) -> None:
        ended = self._run
        self._run = None
        self._attempt(lambda: ended and ended.finish())

    def _attempt(self, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:  # they raise all kinds
            self._run = None
            self._warn(f"nothing is sent to {self._name} any more: {one_line(error)}")


def _kept_id(path: pathlib.Path, prefix: str = "") -> str:
    """The id in a file, which is drawn and written if the file is missing or empty."""
    kept = path.read_text() if path.exists() else ""
    if not kept:
        kept = prefix + secrets.token_hex(8)
        path.write_text(kept)
    return kept


def _jsonable(value: Any) -> Any:
    """The value with None in place of numbers that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
