"""Training on text: the files of a run, exact resuming, and refused data."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import tiny

import train as trainer
from configs.text import CONFIG
from train import export, sample
from train.__main__ import main
from train.config import DataConfig
from train.data import text
from train.metrics import log
from train.run.folder import check_same_experiment
from train.run.loop import train
from train.run.open import open_run
from train.task.forward import go_on


pytestmark = pytest.mark.usefixtures("quick")

TEXT = "abcd efgh ijkl. " * 40 + "größer "


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def small(file):
    data = DataConfig(name="text", files=(str(file),), context=8)
    return tiny.of_words(CONFIG, data, learning_rate=0.02, warmup_steps=2)


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return tiny.run_shared(dataclasses.replace(small, run_dir=str(folder)))


def test_the_run_ends_with_a_test_and_a_sample(finished):
    run, result = finished
    center, best = result.tested.center, result.tested.best
    events = log.read(result.folder)
    assert events["test"][-1]["center_loss"] == center["loss"]
    assert events["test"][-1]["best_bits_per_byte"] == best["bits_per_byte"]
    assert events["start"][0]["train_characters"] == len(TEXT) * 9 // 10
    assert events["train"][0]["loss"] > 0.6 > events["train"][-1]["loss"]
    sample = (result.folder / "sample.txt").read_text()
    assert len(sample) == 500 and set(sample) <= set(TEXT)
    # Likely letters are drawn: most are followed by their successor.
    pairs = [TEXT[i : i + 2] for i in range(64)]
    assert np.mean([sample[i : i + 2] in pairs for i in range(499)]) > 0.5
    assert run.experiment.sample(run.find_center(go_on)) == sample


def test_a_trained_model_continues_a_prompt(finished, refusal, capsys):
    run, result = finished
    folder = str(result.folder)
    assert sample.main([folder, "--which", "last"]) == 0  # as at the end of the run
    assert capsys.readouterr().out == (result.folder / "sample.txt").read_text() + "\n"
    cold = ["--prompt", "abcd e", "--length", "9", "--temperature", "0.01"]
    assert sample.main([folder, *cold]) == 0
    assert capsys.readouterr().out == "abcd efgh ijkl.\n"
    refused = {
        "--prompt zax": "has 17 characters, and not 'x', 'z'",
        "--temperature 0": "`temperature` must be positive",
        "--beam 2": "`beam` is for runs on translation",
        "--seed -1": "`seed` must be in [0, 2**32), got seed=-1",
        f"--seed {10**20}": f"`seed` must be in [0, 2**32), got seed={10**20}",
        f"--length {10**20}": f"`length` must be less than 2**31, got length={10**20}",
    }
    for options, message in refused.items():
        assert message in refusal(sample.main, [folder, *options.split()])
    with pytest.raises(ValueError, match="needs a run on translation, not on text"):
        trainer.load(folder).translate(["abcd"])


def test_a_model_of_text_is_loaded_and_exported(finished, tmp_path):
    run, result = finished
    loaded = trainer.load(result.folder, "last")
    ids = loaded.vocabulary.encode("abcd efg")
    (logits,) = jax.jit(loaded.logits)(ids[None])
    assert loaded.vocabulary.decode(np.argmax(logits, 1)) == "bcd efgh"
    assert export.main([str(result.folder), str(tmp_path / "out")]) == 0
    said = json.loads((tmp_path / "out" / "model.json").read_text())
    assert said["characters"] == loaded.vocabulary.characters
    assert said["arguments"]["width"] == 16 and said["outputs"] == 17


@pytest.mark.slow
def test_a_test_is_the_mean_over_the_validation_text(finished):
    """Computed from consecutive windows in one batch, without workers."""
    run, result = finished
    vocabulary = run.experiment.forward.vocabulary
    ids = text.of(TEXT.encode(), "characters").test.astype(np.int32)
    params = jax.tree.map(lambda x: x[0], run.state.params)  # the workers are equal
    windows = ids[8 * np.arange(8)[:, None] + np.arange(9)]
    assert windows[-1, -1] == ids[-1] and len(ids) == 65
    apply = jax.jit(run.experiment.forward.model.apply)
    logits = np.asarray(apply({"params": params}, windows[:, :-1]), np.float64)
    likely = np.take_along_axis(logits, windows[:, 1:, None], axis=2)[..., 0]
    losses = np.log(np.exp(logits).sum(axis=2)) - likely
    tested = run.experiment.test_worker(run.state, 0)
    assert tested["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    nbytes = len(vocabulary.decode(ids[1:]).encode())
    assert nbytes == losses.size + 2  # ö and ß
    expected = np.sum(losses) / math.log(2) / nbytes
    assert tested["bits_per_byte"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow  # `test_loop.py` resumes on other data
def test_resuming_is_exact(finished, small, tmp_path):
    config = dataclasses.replace(small, run_dir=str(tmp_path / "run"))
    stopped = open_run(config)
    stopped.config = dataclasses.replace(config, steps=30)
    train(stopped)
    run = open_run(dataclasses.replace(config, resume=True))
    assert run.step == 30
    assert train(run).tested == finished[1].tested
    tiny.assert_equal_to_the_bit(run.state, finished[0].state)


def test_a_run_on_another_text_of_the_same_characters_is_refused(finished, small, tmp_path):
    """And the file may move."""
    folder = finished[1].folder
    again = dataclasses.replace(small, run_dir=str(folder), resume=True)
    kept = (folder / "vocabulary.json").read_text()
    other, moved = tmp_path / "other", tmp_path / "moved"
    other.write_text(TEXT[::-1])
    moved.write_text(TEXT)
    at = lambda path: dataclasses.replace(
        again, data=dataclasses.replace(again.data, files=(str(path),))
    )
    with pytest.raises(ValueError, match="is a run on other data"):
        open_run(at(other))
    check_same_experiment(at(moved), folder)
    assert (folder / "vocabulary.json").read_text() == kept


@pytest.mark.parametrize(
    "options, message",
    [
        ("text --data.files FILE --data.context 700", "must have at least 701 tokens"),
        ("text --data.files FILE missing", "missing cannot be read: No such file"),
    ],
)
def test_wrong_usage(options, message, file, refusal):
    arguments = options.replace("FILE", str(file)).split()
    assert message in refusal(main, [*arguments, "--workers.locals", "2"])
