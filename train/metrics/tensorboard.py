"""Scalars for TensorBoard, written in the thread of the training loop.

tensorboardX's `SummaryWriter` writes in a thread of its own, which ends at the first error
(a full disk, for example). The loop would then wait for it forever.
"""

import contextlib
import os
import pathlib
import socket
import time
from collections.abc import Generator
from typing import Any

from tensorboardX import summary
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import RecordWriter

from train.metrics.trackers import Event, scalars


FLUSH_S = 30  # a killed process loses at most the events of this many seconds


class TensorBoard:
    """The tracker of TensorBoard's event files.

    After an error, earlier events stay readable, and later ones go to a new file.

    Args:
      folder: the folder, which is created for the first event.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._file: RecordWriter | None = None
        self._flushed = time.monotonic()

    def write(self, event: Event) -> None:
        with self._given_up_on_error():
            if self._file is None:
                self._file = RecordWriter(self._new_path())
                self._file.write(_record(file_version="brain.Event:2"))
            if event["kind"] == "start":
                self._file.write(_session_start(event["step"]))
            for name, value in scalars(event).items():
                shown = summary.scalar(name, value)
                self._file.write(_record(step=event["step"], summary=shown))
            if time.monotonic() - self._flushed > FLUSH_S:
                self._file.flush()
                self._flushed = time.monotonic()

    def _new_path(self) -> str:
        self._folder.mkdir(exist_ok=True)  # the run folder must exist
        now = int(time.time())
        host = socket.gethostname()
        number = sum(1 for _ in self._folder.iterdir())
        name = f"events.out.tfevents.{now}.{host}.{os.getpid()}.{number}"
        return str(self._folder / name)

    def close(self) -> None:
        """Flushes and closes the file."""
        with self._given_up_on_error():
            if self._file is not None:
                self._file.close()
        self._file = None

    @contextlib.contextmanager
    def _given_up_on_error(self) -> Generator[None]:
        """Drops the current file if it cannot be written to."""
        try:
            yield
        except OSError:
            file = self._file
            self._file = None
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
            raise


def _session_start(step: int) -> bytes:
    """Makes TensorBoard drop what a killed session wrote after the step of resuming."""
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # type: ignore
    return _record(step=step + 1, session_log=start)  # it drops this step and later ones


def _record(**values: Any) -> bytes:
    record = event_pb2.Event(wall_time=time.time(), **values)  # type: ignore
    return record.SerializeToString()
