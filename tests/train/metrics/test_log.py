"""metrics.jsonl: events are read as written, also after a crash or on a full disk."""

import json
import os
from unittest.mock import Mock

import pytest

from train.metrics import log
from train.metrics.log import MetricsLog


def no_warning(text):
    raise AssertionError(text)


def test_nonfinite_numbers_become_null(tmp_path):
    writer = MetricsLog(tmp_path, no_warning)
    writer.write("train", 1, 0.5, loss=float("nan"), losses=[1.0, float("inf")])
    writer.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "kind": "train", "step": 1, "seconds": 0.5, "loss": None, "losses": [1.0, None]
    }  # fmt: skip
    assert any((tmp_path / "tensorboard").iterdir())


def test_a_truncated_line_does_not_damage_the_next_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 1, "seconds": 1}\n{"ki'
    )
    writer = MetricsLog(tmp_path, no_warning)
    writer.write("train", 2, 2.0)
    writer.close()
    assert [event["step"] for event in log.read(tmp_path)["train"]] == [1, 2]


def test_damaged_lines_are_skipped(tmp_path):
    """Bytes that are not text, deep nesting, events without a kind or a step."""
    train = '{"kind": "train", "step": %d, "seconds": 1, "loss": %s}'
    lines = [
        train % (1, "0.5"),
        train % (2, "null"),
        '{"kind": "train", "step": "5", "seconds": 1}',
        '{"kind": "train", "step": 6, "seconds": null}',
        '{"kind": ["train"], "step": 7, "seconds": 1}',
        "[" * 100_000,
        "[1]",
        '{"kind": "train", "step": 2}',
        "7",
    ]
    text = "\n".join(lines).encode() + b'\n{"kind": "tra\xff\xfe", "step": 1}\n\x00\n'
    (tmp_path / "metrics.jsonl").write_bytes(text + (train % (11, "0.25")).encode())
    events = log.read(tmp_path)
    assert [event["step"] for event in events["train"]] == [1, 2, 11]
    assert events.keys() == {"train"}


def test_events_behind_the_step_of_resuming_are_left_out(tmp_path):
    writer = MetricsLog(tmp_path, no_warning)
    for event in ("start", 0), ("train", 4), ("train", 8), ("start", 4), ("train", 6):
        writer.write(*event, 0.0, workers=[2, 2])
    writer.close()
    assert [event["step"] for event in log.read(tmp_path)["train"]] == [4, 6]


def test_a_tracker_that_fails_does_not_stop_the_others(tmp_path):
    fails, other, said = Mock(), Mock(), []
    fails.write.side_effect = fails.close.side_effect = OSError("the disk is full")
    writer = MetricsLog(tmp_path, said.append, others=(fails, other))
    writer.write("train", 1, 0.5, loss=0.25)
    assert other.write.call_args[0][0]["loss"] == 0.25 and not writer.is_whole
    writer.close()
    assert len(log.read(tmp_path)["train"]) == 1
    assert said == ["metrics cannot be written any more: the disk is full"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_special_file_is_refused_instead_of_read_forever(tmp_path, make):
    make(tmp_path / log.METRICS)
    with pytest.raises(OSError, match="not a regular file"):
        log.read(tmp_path)
