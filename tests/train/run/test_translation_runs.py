"""Training to translate; text runs and `test_translation.py` cover it in small."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import sentencepiece
import tiny

import train as trainer
from configs.translation import CONFIG
from train import export, sample
from train.__main__ import main
from train.config import DataConfig
from train.data.translation import Pairs, Translation
from train.metrics import log
from train.task import translation as task


pytestmark = pytest.mark.usefixtures("quick")

NUMBERS = zip("one two three four five".split(), "eins zwei drei vier fünf".split())
# Each pair stands ten times, so that the model knows those that are held out.
PAIRS = [(f"{a} is my number now", f"{b} ist jetzt meine Zahl") for a, b in NUMBERS] * 10


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of the pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, lines in zip(("source", "target"), zip(*PAIRS)):
        (folder / name).write_text("\n".join(lines))
    return (str(folder / "source"),), (str(folder / "target"),)


@pytest.fixture(scope="module")
def small(files):
    data = DataConfig("translation", source=files[0], target=files[1], context=16)
    return tiny.of_words(CONFIG, data, learning_rate=0.01, warmup_steps=9)


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return tiny.run_shared(dataclasses.replace(small, run_dir=str(folder)))


@pytest.mark.slow
def test_the_run_ends_with_bleu_and_a_sample(finished):
    run, result = finished
    events, center = log.read(result.folder), result.tested.center
    assert events["end"][-1]["center_bleu"] == center["bleu"] > 50
    assert events["test"][-1]["center_loss"] == center["loss"] < 0.5
    assert events["start"][0]["train_pairs"] == 45
    assert result.guess == pytest.approx(math.log(events["start"][0]["vocabulary"]))
    source, target = run.experiment.forward._test_sentences
    assert (source, target) == tuple(map(list, zip(*PAIRS[-5:])))
    found = trainer.load(result.folder, "last").translate(source)
    assert task.bleu(found, target) == center["bleu"]
    shown = "".join(f"{a}\n  {b}\n" for a, b in zip(source, found))
    assert (result.folder / "sample.txt").read_text() == shown


@pytest.mark.slow
def test_a_test_is_the_mean_over_the_tokens_of_the_validation(finished):
    """Computed one pair at a time, without padding and workers."""
    run, result = finished
    loaded, losses = trainer.load(result.folder, "last"), []
    apply = jax.jit(loaded.logits)
    for pair in PAIRS[-5:]:
        source, target = (np.array(loaded.vocabulary.lists([text])) for text in pair)
        logits = np.asarray(apply((source, target)), np.float64)[0]
        likely = np.take_along_axis(logits, target[0][:, None], axis=1)[:, 0]
        losses += (np.log(np.exp(logits).sum(axis=1)) - likely).tolist()
    assert result.tested.center["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.slow
def test_a_trained_model_translates_a_prompt(finished, refusal, capsys):
    run, result = finished
    folder = str(result.folder)
    assert sample.main([folder, "--prompt", "one is\nfour"]) == 0
    greedy = capsys.readouterr().out
    assert len(greedy.splitlines()) == 2
    assert sample.main([folder, "--prompt", "one is", "--beam", "3"]) == 0
    found = trainer.load(folder).translate(["one is"], beam=3)
    assert capsys.readouterr().out == found[0] + "\n"
    assert trainer.load(folder).translate([]) == []
    refused = {
        "--beam 0": "`beam` must be a positive int",
        f"--beam {2**31}": "`beam` must be less than 2**31",
        "--seed 1": "for runs on text",
    }
    for options, message in refused.items():
        assert message in refusal(sample.main, [folder, *options.split()])


@pytest.mark.slow
def test_a_model_of_translation_is_exported(finished, tmp_path):
    assert export.main([str(finished[1].folder), str(tmp_path / "out")]) == 0
    said = json.loads((tmp_path / "out" / "model.json").read_text())
    assert said["network"].endswith(".EncoderDecoder") and said["arguments"]["width"] == 16
    assert said["input"] == {"tokens": "subwords", "shape": [16], "dtype": "int32"}
    path = str(tmp_path / "out" / "sentencepiece.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=path)
    assert processor.get_piece_size() == said["outputs"]


@pytest.mark.slow
def test_without_sacrebleu_there_is_a_warning_and_no_bleu(finished, monkeypatch):
    run, warned = finished[0], []
    forward, variables = run.experiment.forward, run.experiment.center(run.state)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert forward.score(variables) == {}
    pairs = Pairs(*(forward.vocabulary.encode(side, 16) for side in zip(*PAIRS)))
    data = Translation(pairs, pairs, ([], []), 0, forward.vocabulary, "")
    task.TranslationForward(run.config, data, run.experiment.workers, warned.append)
    (line,) = warned
    assert 'sacrebleu is not installed: pip install -e ".[translation]"' in line


@pytest.mark.parametrize(
    "options, message",
    [
        ("--data.source a", "`data.target` must be given with data.source, and only then"),
        ("--data.source missing --data.target b", "missing cannot be read: No such file"),
    ],
)
def test_wrong_usage(options, message, refusal):
    assert message in refusal(main, ["translation", *options.split()])
