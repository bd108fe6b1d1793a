"""Examples that no worker trains on, whose loss elects leaders."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from images import make_folder
from toys import slow

from configs.text import CONFIG as TEXT
from train import compare, simulate
from train.cluster.session import Session
from train.config import DataConfig, WorkersConfig, methods
from train.data import held_out, imagenet, text
from train.task.experiment import Experiment


@pytest.fixture(autouse=True)
def small(monkeypatch):
    tiny.install(set=monkeypatch.setattr)


def with_lsgd(config, **options):
    method = methods.make("lsgd", local_period=2, global_period=4, **options)
    grid = WorkersConfig(nodes=1, locals=3)
    return dataclasses.replace(config, method=method, workers=grid)


def test_held_out_examples_are_not_trained_on():
    whole = tiny.made_up_digits()
    rest, (images, labels, counts) = held_out.examples(whole, 100)
    assert len(images) == len(labels) == 100 and counts.all()
    together = np.concatenate([rest.train.images, images])
    for found, expected in ((together, whole.train.images), (rest.test, whole.test)):
        pixels = [np.sort(np.ravel(x)) for x in (found[0], expected[0])]
        np.testing.assert_array_equal(*pixels)
    assert len({row.tobytes() for row in together}) == len(together)


def test_image_files_are_held_out_and_read_at_the_start(tmp_path):
    folder = make_folder(tmp_path / "data")
    whole = imagenet.load(folder, 16)
    data = DataConfig("imagenet", dir=str(folder), crop=16, reader_threads=2)
    config = dataclasses.replace(tiny.SMALL, data=data, batch_size=4)
    experiment = Experiment(with_lsgd(config, held_out=5))
    rest, files = held_out.files(whole, 5)
    paths = [{x.path(i) for i in range(len(x.labels))} for x in (rest.train, files)]
    assert len(paths[1]) == 5 and not paths[0] & paths[1]
    assert len(paths[0] | paths[1]) == len(whole.train.labels)
    assert experiment.forward.sizes["train_images"] == len(paths[0])
    images, labels, counts = experiment.forward.held_out
    assert images.shape == (5, 16, 16, 3) and counts.all()
    np.testing.assert_array_equal(labels, files.labels)
    compare.trace(with_lsgd(config, held_out=5), None, Session())


def test_windows_are_held_out_from_the_end_of_the_training_text():
    whole = text.of(bytes(range(256)) * 4, "bytes")
    rest, (windows, counts) = held_out.windows(whole, context=7, count=3)
    assert windows.shape == (3, 8) and counts.shape == (3, 7)
    # Each window starts with the last token of the previous one.
    predicted = np.concatenate([windows[:1, 0], windows[:, 1:].ravel()])
    np.testing.assert_array_equal(np.concatenate([rest.train, predicted]), whole.train)
    np.testing.assert_array_equal(rest.test, whole.test)


def scores_of(state):
    """The mean losses [W] that the last pull of LSGD has recorded, and its leader."""
    *_, own = state.opt_state
    (found,) = [x for x in jax.tree.leaves(own, is_leaf=is_leader) if is_leader(x)][:1]
    return np.asarray(found.score), int(np.asarray(found.leader)[0])


def is_leader(x):
    return hasattr(x, "losses") and hasattr(x, "leader")


@pytest.mark.parametrize("static", [slow(False), True])
def test_the_loss_on_held_out_examples_elects_the_leader(static):
    experiment = Experiment(with_lsgd(tiny.SMALL, held_out=50))
    state = experiment.init()
    for t in range(4):
        before = jax.tree.map(np.asarray, state.params)
        phase = experiment.method.phase(t + 1) if static else None
        batch = experiment.batch(t)
        state, losses = experiment.step(state, experiment.data, batch, phase=phase)
        # Between exchanges the training loss stands, which nothing reads.
        expected = np.asarray(losses)
        if t % 2:
            expected = [loss_on_held_out(experiment, before, i) for i in range(3)]
        scores, leader = scores_of(state)
        np.testing.assert_allclose(scores, expected, rtol=1e-5)
        assert not t % 2 or leader == np.argmin(expected)
    assert not np.allclose(expected, losses, rtol=1e-2)


def loss_on_held_out(experiment, params, worker):
    """The mean cross entropy of a worker's parameters, computed here."""
    images, labels, _ = experiment.forward.held_out
    kernel, bias = (params["Dense_0"][name][worker] for name in ("kernel", "bias"))
    x = np.asarray(experiment.forward.transforms.test(images)).reshape(len(images), -1)
    return -jax.nn.log_softmax(x @ kernel + bias)[np.arange(len(labels)), labels].mean()


def test_a_text_has_held_out_windows(tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question\n" * 20)
    data = DataConfig(name="text", files=(str(tmp_path / "text"),), context=8)
    config = with_lsgd(tiny.of_words(TEXT, data, 0.01, 0), held_out=4)
    experiment = Experiment(config)
    assert isinstance(experiment.data, held_out.WithHeldOut)
    assert experiment.data.held_out.value[0].shape == (4, 9)
    compare.trace(config, None, Session())


def test_a_simulation_refuses_held_out_examples(refusal):
    line = ["digits", "--method", "lsgd", "--method.held-out", "9"]
    assert "`method.held_out` must be 0 to be simulated" in refusal(simulate.main, line)
