"""Loading what a run has trained."""

import json
import pathlib
import re
import shutil
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import train
from train import sample
from train.data import digits
from train.data.arrays import DataError
from train.run.saving import save


pytestmark = pytest.mark.usefixtures("quick")

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "checkpoints.md"


def error(loaded):
    """The test error of a loaded model, in %, computed without the trainer."""
    images, labels = digits.load().test
    return 100 * np.mean(np.argmax(loaded.logits(images), axis=1) != labels)


@pytest.mark.slow
def test_the_center_is_the_model_that_was_tested(finished):
    run, result = finished
    last = train.load(result.folder, "last")
    assert last.step == 12 and last.tested == result.tested.center
    assert error(last) == pytest.approx(result.tested.center["error"])
    leaves = jax.tree.leaves(last.variables)
    assert leaves and all(type(x) is np.ndarray for x in leaves)
    assert train.load(result.folder, 6).step == 6


def test_a_worker_is_its_row_of_the_state(finished):
    run, result = finished
    best = run.buffer.recent.best
    for worker, row in (("best", best), (2, 2)):
        loaded = train.load(result.folder, "last", worker=worker)
        expected = jax.tree.map(lambda x, row=row: x[row], run.state.params)
        jax.tree.map(np.testing.assert_array_equal, loaded.variables["params"], expected)
    assert error(train.load(result.folder, "last", worker="best")) == pytest.approx(
        result.tested.best["error"]
    )


def test_the_program_of_the_page_runs(finished, monkeypatch, capsys):
    program = re.search(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M)[1]
    folder = re.search(r'load\("(.*?)"\)', program)[1]
    exec(program.replace(folder, str(finished[1].folder)), {})
    loaded = train.load(finished[1].folder)
    said = f"step {loaded.step}: test error {error(loaded):.2f} %\n"
    assert capsys.readouterr().out == said


def refused(message, *arguments, **options):
    with pytest.raises(ValueError, match=message) as caught:
        train.load(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_loaded_is_named_in_one_line(finished, tmp_path):
    folder = shutil.copytree(finished[1].folder, tmp_path / "run")
    refused("is no run folder: it holds no config.json", tmp_path)
    refused("must be best, last or one of 6, 12, got which=7", folder, 7)
    refused("must be best, last or a step, got which='first'", folder, "first")
    refused(r"must be best or in \[0, 4\), got worker=4", folder, worker=4)
    notes = folder / "checkpoints" / "6" / "notes" / "metadata"
    checksums = folder / "checkpoints" / "6" / "sha256.json"
    before = {"seconds": 1.0, "workers": {"nodes": 2, "locals": 2}}
    checksums.unlink()
    notes.write_text(json.dumps(before))
    refused("step 6 in .* holds no model, because an earlier version wrote it", folder, 6)
    notes.write_text("{")
    refused("step 6 cannot be read: its notes are incomplete", folder, 6)
    arrays = (folder / "checkpoints" / "12" / "model").rglob("d/*")
    largest = max(arrays, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    refused("checkpoint of step 12 cannot be read: model/d/.* not as it was", folder, 12)
    (folder / "checkpoints" / "12" / "sha256.json").unlink()
    refused("the checkpoint of step 12 cannot be read: ", folder, 12)
    shutil.rmtree(folder / "checkpoints")
    refused("holds no checkpoint yet", folder)


def test_a_run_on_images_cannot_be_sampled(finished, refusal):
    assert "only runs on text can be sampled" in refusal(
        sample.main, [str(finished[1].folder)]
    )


def test_without_data_workers_are_saved_and_the_center_is_not(opened, monkeypatch):
    """Data that fail end a run, and the center's batch statistics need data."""
    fails = Mock(side_effect=DataError("no image can be read any more"))
    run = opened(model="digits-bn")
    with monkeypatch.context() as patch:
        patch.setattr(type(run.experiment), "reestimated", fails)
        assert save(run) and run.checkpoints.close()
    refused("step 0 cannot be read: it holds no center, because", run.folder)
    loaded = train.load(run.folder, worker=1)
    assert loaded.variables.keys() == {"params", "batch_stats"} and loaded.tested is None
