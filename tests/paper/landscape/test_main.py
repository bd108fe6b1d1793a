"""The command: the files that it writes or leaves alone, and wrong usage."""

import shutil
from unittest.mock import Mock

import numpy as np
import pytest
from landscapes import contents, draw, landscape_of

from paper.landscape import cli as command
from paper.landscape.compute import Mark
from train.data.arrays import DataError


@pytest.fixture
def computed(monkeypatch):
    """Gives the command a known landscape."""
    known = landscape_of(np.eye(3), [[1, 1, 1], [0, 0, 0]], [Mark("a", np.zeros(3), 1.0)])
    monkeypatch.setattr(command, "SavedRun", lambda *args: None)
    monkeypatch.setattr(command, "compute_landscape", lambda *args: known)


def test_only_own_results_are_overwritten(copied, computed, capsys):
    assert draw([str(copied)]) == 0 and draw([str(copied)]) == 0
    before = contents(copied)
    for name in ("landscape.png", "landscape.npz"):
        own = (copied / name).read_bytes()
        (copied / name).write_text("mine")
        capsys.readouterr()
        assert draw([str(copied)]) == 2
        assert f"{name} was not written by this command" in capsys.readouterr().err
        assert (copied / name).read_text() == "mine"
        (copied / name).write_bytes(own)
    assert contents(copied) == before


@pytest.mark.slow
def test_results_can_go_to_another_folder(run, computed, tmp_path):
    before = contents(run)
    assert draw([str(run), "--out", str(tmp_path / "a" / "b")]) == 0
    assert contents(run) == before
    names = {path.name for path in (tmp_path / "a" / "b").iterdir()}
    assert names == {"landscape.png", "landscape.npz"}


def test_a_full_disk_leaves_old_results(tmp_path):
    (tmp_path / "landscape.png").write_bytes(b"old")

    def fill(file):
        file.write(b"half of")
        raise OSError("no space left on device")

    with pytest.raises(OSError):
        command.write(tmp_path / "landscape.png", fill)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_status_of_interrupts_and_full_disks(run, computed, monkeypatch, capsys, tmp_path):
    for error, status in ((KeyboardInterrupt(), 130), (OSError("disk full"), 1)):
        monkeypatch.setattr(command, "compute_landscape", Mock(side_effect=error))
        assert draw([str(run), "--out", str(tmp_path)]) == status
        assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options, message",
    [
        ("--worker 4", "`worker` must be in 0..3, got worker=4"),
        ("--step 7", "`step` must be the step of a checkpoint (6, 12), got step=7"),
        ("--grid 1", "`grid` must be at least 2, got grid=1"),
        ("--images 0", "`images` must be a positive int, got images=0"),
        ("--path-steps -1", "`path_steps` must be at least 0, got path_steps=-1"),
        ("--margin nan", "`margin` must be at least 0, got margin=nan"),
    ],
)
def test_wrong_usage(run, options, message, refusal, tmp_path):
    before = contents(run)
    said = refusal(draw, [str(run), *options.split(), "--out", str(tmp_path)])
    assert said.startswith(f"error: {message}") and contents(run) == before


def test_a_folder_without_a_run_or_a_checkpoint(run, tmp_path, capsys):
    out = tmp_path / "out"
    for folder in (tmp_path / "nowhere", tmp_path):
        assert draw([str(folder), "--out", str(out)]) == 2
        assert "cannot be read" in capsys.readouterr().err
    shutil.copy(run / "config.json", tmp_path)
    assert draw([str(tmp_path)]) == 2
    assert f"{tmp_path} holds no checkpoint yet" in capsys.readouterr().err
    assert draw([]) == 2
    assert "run must be given" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}


def test_missing_data(run, monkeypatch, capsys, tmp_path):
    def load(config):
        raise DataError(f"nothing in {config.data.dir}")

    monkeypatch.setattr("paper.landscape.saved_run.load_dataset", load)
    for options, reason in (
        (["--data-dir", "there"], "`data.dir` must be left out with data.name=digits"),
        ([], "nothing in None"),
    ):
        assert draw([str(run), *options, "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {reason}")
