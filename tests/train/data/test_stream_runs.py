"""Whole runs on image files: resuming, tests and failures."""

import contextlib
import dataclasses
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from images import make_folder

from configs.imagenet_resnet50 import CONFIG
from train.__main__ import main
from train.config import DataConfig, OptimizerConfig, WorkersConfig, methods
from train.data import imagenet
from train.data.arrays import DataError
from train.data.stream import Stream
from train.metrics import log
from train.metrics.progress import Progress
from train.run.loop import train
from train.run.open import open_run


SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """24 training images of 3 classes and 9 test images; one of each is broken."""
    made = make_folder(tmp_path_factory.mktemp("images") / "data")
    for path in (made / "train" / "cat" / "0.JPEG", made / "val" / "ant" / "0.JPEG"):
        path.write_bytes(path.read_bytes()[:700])
    return made


def small(folder, run_dir, **changes):
    """A fast experiment on a folder."""
    config = dataclasses.replace(
        CONFIG,
        model="digits-cnn",
        data=DataConfig("imagenet", dir=str(folder), crop=SIZE, reader_threads=2),
        optimizer=OptimizerConfig(learning_rate=0.001, momentum=0.9),
        workers=WorkersConfig(nodes=1, locals=2),
        method=methods.make("lsgd", 0.1, 0.0, 2, 4),
        steps=8,
        batch_size=4,
        log_every=4,
        test_every=4,
        checkpoint_every=4,
        run_dir=str(run_dir),
    )
    return dataclasses.replace(config, **changes)


def no_readers():
    return not [x for x in threading.enumerate() if x.name.startswith("grain-thread")]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    tiny.install(set=monkeypatch.setattr)
    monkeypatch.setattr(imagenet, "WAITS", (0.05,))  # in place of a minute


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """A finished run with reestimated batch statistics: (run, result)."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        tiny.install(set=patch.setattr)
        traces = tiny.note_traces(patch.setattr)
        run = open_run(small(folder, run_dir, model="digits-bn"))
        result = train(run)
    assert len(traces) == 1
    return run, result


@pytest.mark.slow  # `test_stream.py` has the batches, and `test_resuming.py` other data
def test_resuming_is_bit_identical(finished, folder, tmp_path, capsys):
    """run(8) equals run(4), resume, run(4) with other threads and buffers."""
    run, result = finished
    config = small(folder, tmp_path / "run", model="digits-bn")
    train(open_run(dataclasses.replace(config, steps=4)))
    assert no_readers()
    data = dataclasses.replace(config.data, reader_threads=3, read_ahead=1)
    second = open_run(dataclasses.replace(config, data=data, resume=True))
    assert second.step == 4
    again = train(second)
    tiny.assert_equal_to_the_bit(run.state, second.state)
    tests = lambda folder: [
        {name: value for name, value in event.items() if name != "seconds"}
        for event in log.read(folder)["test"]
    ]
    assert tests(again.folder) == tests(result.folder)
    assert [event["step"] for event in tests(result.folder)] == [4, 8]
    printed = capsys.readouterr().out  # in two sessions
    assert printed.count("cat/0.JPEG is left out") == 2 == printed.count("ant/0.JPEG is")


@pytest.mark.slow
def test_the_step_needs_nothing_from_the_host(finished):
    run, _ = finished
    experiment, state = run.experiment, run.experiment.init()
    with contextlib.closing(experiment.batches(range(3))) as batches:
        for batch in batches:
            with jax.transfer_guard("disallow"):
                state, _ = experiment.step(state, experiment.data, batch)


@pytest.mark.slow
def test_a_test_counts_the_images_that_can_be_read(folder, tmp_path, capsys):
    data = shutil.copytree(folder, tmp_path / "data")
    run = open_run(small(data, tmp_path / "run", steps=16, test_every=16))
    result = train(run)
    events = log.read(result.folder)
    assert events["train"][-1]["loss"] < events["train"][0]["loss"]
    sizes = {"train_images": 24, "test_images": 9, "classes": 3}
    assert events["start"][0].items() >= sizes.items()
    printed = capsys.readouterr().out
    assert printed.count("warning: ") == printed.count("is left out") == 2

    files = imagenet.load(data).test
    params, wrong = jax.tree.map(lambda x: x[1], run.state.params), 0
    for row in range(1, 9):
        pixels = imagenet.read(files.path(row), SIZE, imagenet.center_box)
        x = run.experiment.forward.transforms.test(jnp.asarray(pixels[None]))
        logits = run.experiment.forward.model.apply({"params": params}, x, False)
        wrong += int(np.argmax(logits) != files.labels[row])
    error = run.experiment.test_worker(run.state, 1)["error"]
    assert error == pytest.approx(100 * wrong / 8)
    shutil.rmtree(data / "val")
    with pytest.raises(DataError, match="9 images in a row cannot be read, the last"):
        run.experiment.test_worker(run.state, 1)


def test_a_run_whose_data_vanish_saves_a_checkpoint(folder, tmp_path, capsys, monkeypatch):
    data, batches = shutil.copytree(folder, tmp_path / "data"), Stream.batches
    # The broken image has another reason, and any image can be the last that is tried.
    (data / "train" / "cat" / "0.JPEG").unlink()

    def vanishing(self, steps):
        for step, batch in zip(steps, batches(self, steps)):
            yield batch
            if step == 3:
                shutil.rmtree(data)

    monkeypatch.setattr(Stream, "batches", vanishing)
    command = "imagenet-resnet50 --model digits-cnn --batch-size 4 --data.crop 16"
    where = ["--data.dir", str(data), "--run-dir", str(tmp_path / "run")]
    assert main([*command.split(), "--workers.locals", "2", *where]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: 23 images in a row cannot be read, the last")
    assert error.endswith(
        "No such file or directory; to resume later: python -m train imagenet-resnet50 "
        f"--run-dir {tmp_path / 'run'} --resume"
    )
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(saved.name) > 3 and no_readers()


def test_a_run_does_not_resume_with_other_data(finished, tmp_path):
    run, result = finished
    copy = shutil.copytree(result.folder, tmp_path / "run")
    before = sorted(copy.rglob("*"))
    other = make_folder(tmp_path / "other", classes=("ant", "bee"))
    data = dataclasses.replace(run.config.data, dir=str(other))
    config = dataclasses.replace(run.config, data=data, run_dir=str(copy), resume=True)
    with pytest.raises(ValueError, match="is a run on other data: with 24 train images"):
        open_run(config)
    assert sorted(copy.rglob("*")) == before
    renamed = shutil.copytree(run.config.data.dir, tmp_path / "renamed")
    for part in ("train", "val"):
        first = min((renamed / part).iterdir())
        first.rename(first.with_name("aa"))
    data = dataclasses.replace(run.config.data, dir=str(renamed))
    with pytest.raises(ValueError, match="is a run on other data, which .*classes.json"):
        open_run(dataclasses.replace(config, data=data))


def test_each_process_warns_about_its_own_files(capsys):
    shown = Progress(10, process=1)
    shown.warn("for all to know")
    shown.warn_here("a.jpeg is left out")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith("warning: a.jpeg is left out\n")
