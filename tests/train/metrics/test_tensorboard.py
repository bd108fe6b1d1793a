"""TensorBoard's files: values are read as written, and errors do not block."""

import errno
import os
import struct
from unittest.mock import Mock

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

from train.metrics import tensorboard
from train.metrics.tensorboard import TensorBoard


def values(folder):
    """(name, step, value) of each event in a folder, as TensorBoard shows them.

    A session that starts at a step drops events of this and of later steps.
    """
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: int(path.suffix[1:])):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            if event.session_log.status == SessionLog.START:
                found = [old for old in found if old[1] < event.step]
            found += [(x.tag, event.step, x.simple_value) for x in event.summary.value]
            data = data[16 + length :]
    return found


def event(step, **values):
    return {"kind": "train", "step": step, **values}


def test_values_are_read_as_written(tmp_path):
    writer = TensorBoard(tmp_path / "tensorboard")
    writer.write(event(1, loss=0.5, steps=3))
    writer.write(event(2, loss=0.25))
    writer.close()
    expected = [("train/loss", 1, 0.5), ("train/steps", 1, 3.0), ("train/loss", 2, 0.25)]
    assert values(tmp_path / "tensorboard") == expected


def test_curves_do_not_run_back_after_a_kill(tmp_path):
    killed = TensorBoard(tmp_path)
    killed.write(event(0) | {"kind": "start"})
    for step in 5, 10, 15:
        killed.write(event(step, a=1.0))
    killed.close()
    resumed = TensorBoard(tmp_path)
    resumed.write(event(10) | {"kind": "start"})
    resumed.write(event(15, a=2.0))
    resumed.close()
    assert values(tmp_path) == [
        ("train/a", 5, 1.0),
        ("train/a", 10, 1.0),
        ("train/a", 15, 2),
    ]


def test_buffered_events_are_written_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "FLUSH_S", 0)
    writer = TensorBoard(tmp_path)
    writer.write(event(1, a=1.0))
    assert values(tmp_path) == [("train/a", 1, 1.0)]
    writer.close()


def test_a_full_disk_does_not_block_and_later_events_are_written(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    writer = TensorBoard(tmp_path)
    writer.write(event(1, a=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", full)
        for step in range(2, 50):  # more than any queue would hold
            with pytest.raises(OSError, match="No space left"):
                writer.write(event(step, a=1.0))
    writer.write(event(50, a=2.0))
    writer.close()
    assert values(tmp_path) == [("train/a", 1, 1.0), ("train/a", 50, 2.0)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_an_error_at_the_end_is_raised_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "RecordWriter", lambda path: RecordWriter("/dev/full"))
    writer = TensorBoard(tmp_path)
    writer.write(event(1, a=1.0))  # is buffered
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    writer.close()
