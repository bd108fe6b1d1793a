"""Figures of metrics that are damaged in parts."""

import json

from train import plots


def test_events_that_are_not_as_they_must_be_are_left_out(tmp_path):
    at = lambda kind, step, **values: {"kind": kind, "step": step, "seconds": 1, **values}
    leaders = lambda step, **values: at("leaders", step, **{"level": "all", **values})
    events = [
        at("start", 0, workers=[1, "2"]),
        at("start", 0, workers=[1, 2]),
        at("train", 4, loss="low", consensus_distance=[]),
        at("train", 8, loss=1.0, consensus_distance=0.5, pulls=[[4, 0, 80, 2]]),
        at("train", 9, loss=1.0, pulls=[[0, 0, 80, 2]]),
        at("train", 9, loss=1.0, pulls=[4]),
        at("test", 8, center_error={}, best_error=None),
        leaders(4, leaders=[1]),
        leaders(6, leaders=["1"]),
        leaders(8, leaders=1),
        leaders(8),
        at("leaders", 8, leaders=[0]),
    ]
    lines = "\n".join(map(json.dumps, events))
    (tmp_path / "metrics.jsonl").write_text(lines)
    drawn = {path.name for path in plots.draw(tmp_path)}
    assert drawn == {"training.png", "leaders.png", "consensus.png", "traffic.png"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(events[5]))
    assert plots.draw(tmp_path) == []
