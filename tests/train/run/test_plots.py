"""The figures of a run."""

import json

import numpy as np
import pytest
from outside import python

from train.metrics import drawing
from train.plots import main as draw_plots
from train.run import plots


def test_runs_without_figures_and_with_broken_metrics(tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"kind": "test", "step": 8, "seconds": 1}')
    assert plots.draw(tmp_path) == []
    metrics.write_text('{"kind": "leaders", "step": 8, "seconds": 1}')
    assert draw_plots([str(tmp_path)]) == 2
    damaged = f"error: {tmp_path} cannot be drawn, its metrics.jsonl is damaged: KeyError("
    assert capsys.readouterr().err.startswith(damaged)
    metrics.unlink()
    for folder, wrong in ((tmp_path, "holds no metrics.jsonl"), ("no", "does not exist")):
        assert draw_plots([str(folder)]) == 2
        expected = f"error: {folder} is no run folder: it {wrong}\n"
        assert capsys.readouterr().err == expected


def test_figures_name_the_run_and_count_elections_in_integers(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(drawing.plt, "close", drawn.append)
    at = lambda kind, **values: {"kind": kind, "step": 9, "seconds": 1, **values}
    events = [
        at("start", workers=[1, 2]),
        at("train", loss=1.0, consensus_distance=0.5),
        at("leaders", level="all", leaders=[1]),
        at("pace", steps=[4, 5], waited=[0.5, 0.1]),
        at("pace", steps=[4, 5, 6], waited=[0.5, 0.1, 0]),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))
    (tmp_path / "config.json").write_text(json.dumps({"method": {"name": "easgd"}}))
    names = [path.stem for path in plots.draw(tmp_path)]
    assert names == ["training", "leaders", "consensus", "pace"]
    assert {figure.get_suptitle() for figure in drawn} == {f"{tmp_path.name}: easgd"}
    for axes in [axes for figure in drawn for axes in figure.axes]:
        assert axes.get_xlabel() and axes.get_ylabel()
    when, often = drawn[1].axes
    assert all(tick == int(tick) for tick in often.get_xticks())
    assert [len(line.get_xdata()) for line in drawn[3].axes[0].lines] == [1, 1, 1]


@pytest.mark.slow
def test_figures_show_each_step_and_both_sides_of_an_exchange(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(drawing.plt, "close", drawn.append)
    at = lambda step, **values: {"kind": "train", "step": step, "seconds": step, **values}
    events = [
        at(2, loss=3.0, step_losses=[4.0, 2.0], consensus_distance=0.2),
        at(300, loss=1.5, step_losses=[None, 1.5], consensus_distance=0.3)
        | {"exchange": [299, 0.9, 0.1], "pulls": [[20, 0, 10, 15]]},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))
    plots.draw(tmp_path)
    training, consensus, traffic = drawn
    by_step, smooth = training.axes[0].lines
    np.testing.assert_array_equal(by_step.get_xydata(), [[1, 4], [2, 2], [300, 1.5]])
    assert len(smooth.get_xdata()) == 3
    labels = [text.get_text() for text in training.axes[0].get_legend().get_texts()]
    assert labels == ["each step", "smoothed"]
    by_second = training.axes[1].lines[0].get_xdata()
    np.testing.assert_array_equal(by_second, [1, 2, 300])
    before, after = (x.get_xydata().tolist() for x in consensus.axes[0].lines)
    assert (before, after) == ([[299, 0.9]], [[299, 0.1]])
    assert traffic.axes[0].get_title().startswith("the first 100 of 300 steps; peak ")


def test_an_unwritable_home_causes_no_warning_of_matplotlib(tmp_path):
    def errors(imports):
        code = f"import {imports}; matplotlib.get_cachedir()"
        home = {"HOME": "/proc/none", "MPLCONFIGDIR": "", "TMPDIR": str(tmp_path)}
        ended = python("-c", code, **home)
        ended.check_returncode()
        return ended.stderr

    assert "temporary cache directory" in errors("matplotlib")
    assert errors("train, matplotlib") == ""
