"""Opening runs: exact resuming, damaged files, and refused configurations."""

import dataclasses
import io
import json
import pathlib
import re
import shutil
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import tiny
from landscapes import draw as landscape

from train import compare, launch
from train.__main__ import main
from train.config import DataConfig, WorkersConfig
from train.metrics import log
from train.plots import main as draw_plots
from train.process import numerics
from train.process.command import Lasting
from train.run.lock import RunLock
from train.run.loop import train
from train.run.open import open_run
from train.run.resuming import how_to_resume
from train.task.experiment import Experiment


pytestmark = pytest.mark.usefixtures("quick")


# Resuming


def test_a_run_folder_of_version_0_1_is_refused(copied, tmp_path, refusal, capsys):
    """Its metrics can still be drawn. Only that version can read its checkpoints."""
    out = tmp_path / "out"
    out.mkdir()
    folder = pathlib.Path(copied.run_dir).rename(out / "lsgd-0")
    path = folder / "config.json"
    values = json.loads(path.read_text())
    assert values.pop("format") == 2
    path.write_text(json.dumps(values))
    for command, arguments in (
        (main, ["digits", "--resume", "--run-dir", str(folder)]),
        (landscape, [str(folder)]),
        (compare.main, ["digits", "--methods", "lsgd", "--out", str(out)]),
    ):
        assert f"{path} cannot be read: its run is in format 1," in refusal(
            command, arguments
        )
    assert draw_plots([str(folder)]) == 0
    names = [line.rpartition("/")[2] for line in capsys.readouterr().out.splitlines()]
    assert names == [f"{x}.png" for x in ("training", "leaders", "consensus", "traffic")]
    for name in names:
        assert (folder / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_metrics_that_cannot_be_read_are_refused_in_one_line(copied):
    metrics = pathlib.Path(copied.run_dir) / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    with pytest.raises(
        ValueError, match="metrics.jsonl cannot be read: .*not a regular file"
    ):
        open_run(copied)


def test_settings_of_jax_that_change_numbers_are_refused(copied):
    folder = pathlib.Path(copied.run_dir)
    with jax.threefry_partitionable(False):
        message = "not False; set JAX_THREEFRY_PARTITIONABLE=True to resume it"
        with pytest.raises(ValueError, match=message):
            open_run(copied)
    with jax.default_matmul_precision("float32"):
        with pytest.raises(ValueError, match="unset JAX_DEFAULT_MATMUL_PRECISION"):
            open_run(copied)
    assert not (folder / "lock").exists()


def test_other_versions_of_packages_are_a_warning(copied, monkeypatch, capsys):
    monkeypatch.setattr(numerics, "versions", lambda: {"optax": "0.0"})
    train(open_run(copied))
    printed = capsys.readouterr().out
    assert re.search(r"with other versions: optax \S+ -> 0.0", printed)
    (*_, start) = log.read(pathlib.Path(copied.run_dir))["start"]
    assert start["packages"] == {"optax": "0.0"}


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a file", "a dead link"])
def test_a_run_that_has_lost_its_checkpoints_does_not_begin_again(copied, left):
    path = pathlib.Path(copied.run_dir) / "checkpoints"
    shutil.rmtree(path)
    match left:
        case "an empty folder":
            path.mkdir()
        case "a file":
            path.touch()
        case "a dead link":
            path.symlink_to("unmounted")
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(
        ValueError, match="checkpoints must hold the checkpoints of the run"
    ):
        open_run(copied)
    assert sorted(path.parent.rglob("*")) == before


def test_a_run_that_never_saved_may_begin_again(copied):
    folder = pathlib.Path(copied.run_dir)
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()
    lines = (folder / log.METRICS).read_text().splitlines(keepends=True)
    (folder / log.METRICS).write_text("".join(x for x in lines if '"saved"' not in x))
    assert open_run(copied).step == 0


def test_an_open_run_tells_the_launcher_how_to_resume_it(opened, tmp_path, monkeypatch):
    told = tmp_path / "told"
    monkeypatch.setenv(launch.TOLD, str(told))
    run = opened()
    again = how_to_resume(run.config, run.folder)
    assert launch.how_to_continue(told.read_text()) == again and "--resume" in again


def test_a_folder_that_exists_is_never_overwritten(finished):
    _, result = finished
    before = {path: path.stat().st_mtime_ns for path in result.folder.rglob("*")}
    with pytest.raises(ValueError, match="must be a new folder, .* exists; add --resume"):
        open_run(dataclasses.replace(tiny.SMALL, run_dir=str(result.folder)))
    assert before == {path: path.stat().st_mtime_ns for path in result.folder.rglob("*")}


def test_a_run_survives_a_full_standard_output_and_records_it(opened, monkeypatch):
    with open("/dev/full", "wb", buffering=0) as full:
        screen = io.TextIOWrapper(full, write_through=True)
        monkeypatch.setattr("sys.stdout", Lasting(screen, "standard output"))
        result = train(opened())
    assert result.step == 12 and result.saved
    (warning,) = log.read(result.folder)["warning"]
    assert warning["text"].startswith("standard output cannot be written any more: [Errno")


# Data


def test_data_can_be_split_between_the_workers():
    """That workers learn from them is tested with asynchronous workers."""
    data = DataConfig("digits", shard=True)
    experiment = Experiment(dataclasses.replace(tiny.SMALL, data=data))
    images, labels = experiment.data
    assert images.shape == (4, 1437 // 4, 8, 8, 1) and labels.shape == (4, 1437 // 4)
    rows = np.asarray(experiment.batch(0))
    assert rows.shape == (4, 16) and rows.max() < 1437 // 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 2000}, "`batch_size` must be at most 1437"),
        (
            {"data": DataConfig("digits", shard=True), "workers": WorkersConfig(8, 250)},
            "`batch_size` must be at most 0, the number of training examples per worker",
        ),
        ({"model": "cnn7"}, "`model` must fit the data: 'cnn7' takes 28 x 28 images"),
        ({"data": DataConfig("cifar10", dir="/no/such")}, "/no/such does not exist"),
    ],
)
def test_a_refused_configuration_leaves_no_folder(opened, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        opened(**changes)
    assert not (tmp_path / "run").exists()


def test_no_event_is_written_to_a_folder_taken_over_by_another_run(opened, monkeypatch):
    monkeypatch.setattr(RunLock, "check", Mock(side_effect=SystemExit))
    run = opened()
    with pytest.raises(SystemExit):
        run.write("train", loss=1.0)
    assert not (run.folder / log.METRICS).exists()
