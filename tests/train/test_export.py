"""Exporting a trained model, and reading it without the trainer."""

import dataclasses
import importlib
import json
import os
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import tiny
from flax.traverse_util import unflatten_dict
from safetensors.flax import load_file

import train
from train.export import main


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with batch statistics, whose workers are sharded over two devices each."""
    folder = tmp_path_factory.mktemp("export") / "run"
    workers = dataclasses.replace(tiny.SMALL.workers, inside=("fsdp=2",))
    changes = dict(model="digits-bn", workers=workers, steps=2, run_dir=str(folder))
    return tiny.run_shared(dataclasses.replace(tiny.SMALL, **changes))


@pytest.fixture
def run(finished):
    return finished[1]


@pytest.mark.slow
def test_plain_flax_reads_what_was_exported(run, tmp_path):
    out = tmp_path / "new" / "out"
    assert main([str(run.folder), str(out)]) == 0
    said = json.loads((out / "model.json").read_text())
    module, name = said["network"].rsplit(".", 1)
    network = getattr(importlib.import_module(module), name)(**said["arguments"])
    variables = unflatten_dict(load_file(out / "model.safetensors"), sep=".")
    assert variables.keys() == {"params", "batch_stats"}
    images, labels = tiny.made_up_digits().test
    black, white = (np.array(said["input"][x]) for x in ("black", "white"))
    x = (black + (white - black) * images / 255).astype(np.float32)
    assert list(x.shape[1:]) == said["input"]["shape"] and said["outputs"] == 10
    logits = jax.jit(network.apply, static_argnums=2)(variables, x, False)
    error = 100 * np.mean(np.argmax(logits, 1) != labels)
    assert error == pytest.approx(run.tested.center["error"])
    assert (said["step"], said["tested"]) == (2, run.tested.center)
    assert said["configuration"]["batch_size"] == 16


def test_nothing_is_overwritten_and_a_failed_export_leaves_nothing(
    run, tmp_path, refusal, monkeypatch, capsys
):
    (tmp_path / "out").mkdir()
    said = refusal(main, [str(run.folder), "out"])
    assert said == "error: `out` must be a new folder, but out exists\n"
    said = refusal(main, ["nothing", "new"])
    assert said == "error: nothing is no run folder: it does not exist\n"
    assert "error: run, out must be given" in refusal(main, [])
    no_space = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("safetensors.numpy.save", no_space)
    assert main([str(run.folder), "new"]) == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"
    assert not (tmp_path / "new").exists()


def test_files_have_the_mode_that_the_umask_says(run, tmp_path):
    kept = os.umask(0o027)
    try:
        assert main([str(run.folder), str(tmp_path / "out")]) == 0
    finally:
        os.umask(kept)
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()
    }
    assert modes == {"model.json": 0o640, "model.safetensors": 0o640}


def test_without_safetensors_one_line_says_how_to_install_it(run, refusal, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install -e ".[export]"' in refusal(main, [str(run.folder), "out"])


def test_the_best_worker_is_exported(run, tmp_path):
    options = ["--model", "best-worker", "--which", "last"]
    assert main([str(run.folder), str(tmp_path / "out"), *options]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = train.load(run.folder, worker="best").variables["params"]
    np.testing.assert_array_equal(
        tensors["params.Dense_0.kernel"], expected["Dense_0"]["kernel"]
    )


def test_a_worker_is_loaded_with_its_own_statistics(finished):
    run, result = finished
    own = train.load(result.folder, worker=3).variables["batch_stats"]
    expected = jax.tree.map(lambda x: x[3], run.state.stats["batch_stats"])
    jax.tree.map(np.testing.assert_array_equal, own, expected)
