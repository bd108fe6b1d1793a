"""Damaged checkpoints, and checkpoints of another grid of workers."""

import dataclasses
import shutil

import pytest
from landscapes import SMALL, contents, draw

from configs import text
from paper.landscape.saved_run import SavedRun
from train.config import WorkersConfig, settings
from train.run.loop import train
from train.run.open import open_run


def test_a_damaged_checkpoint_is_reported_and_left_alone(
    copied, saved, monkeypatch, capsys
):
    build = lambda config, data: saved.experiment
    monkeypatch.setattr("paper.landscape.saved_run.Experiment", build)
    (broken,) = copied.glob("checkpoints/12/state/_METADATA")
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    before = contents(copied)
    assert draw([str(copied), "--step", "12"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: the checkpoint of step 12 cannot be read: ")
    lines = []
    assert SavedRun(copied, None, None, lines.append).step == 6
    assert len(lines) == 1 and "the checkpoint of step 12 cannot be read" in lines[0]
    (copied / "checkpoints/6/state/_METADATA").write_bytes(b"")
    assert draw([str(copied)]) == 2
    assert "holds no checkpoint that can be read" in capsys.readouterr().err
    assert contents(copied).keys() == before.keys()


def test_a_run_on_text_is_refused(tmp_path, capsys):
    settings.write(text.CONFIG, tmp_path / "config.json")
    assert draw([str(tmp_path)]) == 2
    assert "is a run on text; only runs on images" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_resumed_with_another_grid_of_workers(run, tmp_path):
    """Each checkpoint is read with its own grid; trajectories do not cross a change."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    workers = WorkersConfig(nodes=1, locals=2)
    more = {"steps": 18, "workers": workers, "run_dir": str(folder), "resume": True}
    train(open_run(dataclasses.replace(SMALL, **more)))
    latest = SavedRun(folder, None, None, pytest.fail)
    assert latest.step == 18 and latest.experiment.workers.num_workers == 2
    assert latest.step_before() == 18  # four workers' steps cannot be retraced to here
    before = SavedRun(folder, 12, None, pytest.fail)
    assert before.experiment.workers.num_workers == 4 and before.step_before() == 6
