"""Bytes at each step: schedules agree with the counters, and the figure shows them."""

import json

import numpy as np
import pytest
import tiny

from train.metrics import drawing, log, traffic
from train.run import cli, plots
from train.run.loop import train
from train.run.open import open_run


SMALL = (
    "digits --workers.nodes 1 --workers.locals 2 --batch-size 8 --steps 9 --log-every 1 "
    "--test-every 9 --checkpoint-every 9"
).split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "diloco --method.period 4 --method.fragments 2 --method.delay 1 --method.wire int8",
        "local-sgd --method.period 1,2:3 --method.after 1",
        "post-local-sgd --method.period 3 --method.switch-step 4",
        "palsgd --method.period 3 --method.probability 0.6",
    ],
)
def test_the_schedules_agree_with_the_counters_at_each_step(monkeypatch, tmp_path, method):
    tiny.install(set=monkeypatch.setattr)
    options = ["--method", *method.split(), "--run-dir", str(tmp_path / "run")]
    train(open_run(cli.parse([*SMALL, *options])))
    events = log.read(tmp_path / "run")["train"]
    counted = np.diff([0, *(event["bytes_sent"] for event in events)])
    sent = traffic.of_run(events)
    assert sent is not None and len(sent) == 9 and sent.max() > sent.min()
    np.testing.assert_array_equal(sent, counted)


def figure(monkeypatch, tmp_path, pulls, steps):
    """The figure traffic.png of a run with these pulls, or None."""
    drawn = []
    monkeypatch.setattr(drawing.plt, "close", drawn.append)
    event = {"kind": "train", "step": steps, "seconds": 1, "loss": 1.0, "pulls": pulls}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(event))
    names = [path.name for path in plots.draw(tmp_path)]
    return dict(zip(names, drawn)).get("traffic.png")


@pytest.mark.slow
def test_fragments_lower_the_peak_and_not_the_mean(monkeypatch, tmp_path):
    whole = [[100, 0, 4_000_000, 20]]
    streaming = [[100, at, 1_000_000, 20] for at in (20, 45, 70, 95)]
    for pulls, peak, steps in (
        (whole, 4, [100, 200]),
        (streaming, 1, [20, 45, 70, 95, 120, 145, 170, 195]),
    ):
        (axes,) = figure(monkeypatch, tmp_path, pulls, steps=2000).axes
        heights = {round(x.get_center()[0]): x.get_height() for x in axes.patches}
        sent = {step: height for step, height in heights.items() if height}
        assert len(heights) == 200 and sent == dict.fromkeys(steps, peak)
        assert axes.get_title() == (
            f"the first 200 of 2000 steps; peak {peak} MB in a step, mean 0.04 MB a step"
        )


def test_a_run_that_sends_nothing_has_no_traffic_figure(monkeypatch, tmp_path):
    assert figure(monkeypatch, tmp_path, [[16, 0, 80, 0]], steps=9) is None
    assert traffic.of_run([{"pulls": []}]) is None
