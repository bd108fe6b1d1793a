"""Images in a folder per class: what is found, and what is wrong with a folder."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from images import make_folder

from configs.imagenet_resnet50 import CONFIG
from train import config as configuration
from train.__main__ import main
from train.config import DataConfig
from train.data import imagenet
from train.data.arrays import DataError
from train.task import models
from train.task.models import Bottleneck, ResNet50


def test_classes_and_images_are_in_alphabetical_order(tmp_path):
    make_folder(tmp_path, classes=("bee", "ant"), train=3, val=2)
    (tmp_path / "train" / "ant" / "B.JpG").write_bytes(b"")
    (tmp_path / "train" / "ant" / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "train" / "ant" / "readme.txt").write_text("no image")
    (tmp_path / "train" / "ant" / "._0.JPEG").write_text("another system's notes")
    (tmp_path / "train" / "ant" / "folder.jpeg").mkdir()
    (tmp_path / "train" / "list.txt").write_text("ant bee")
    found = imagenet.load(tmp_path, image_size=32)
    assert found.train.classes == found.test.classes == ("ant", "bee")
    assert (found.num_classes, found.image_shape) == (2, (32, 32, 3))
    names = [found.train.path(i) for i in range(len(found.train.labels))]
    expected = [f"ant/{x}" for x in ("0.JPEG", "1.JPEG", "2.JPEG", "B.JpG", "gone.png")]
    expected += [f"bee/{i}.JPEG" for i in range(3)]
    assert names == [f"{tmp_path}/train/{x}" for x in expected]
    assert found.train.labels.tolist() == [0] * 5 + [1] * 3
    assert found.train.labels.dtype == np.int32
    assert found.test.path(3) == f"{tmp_path}/val/bee/1.JPEG"


def test_a_class_of_its_own_may_be_one_image(tmp_path):
    found = imagenet.load(make_folder(tmp_path / "a", ("ant",), train=1, val=1))
    assert found.train.labels.tolist() == found.test.labels.tolist() == [0]


def test_names_that_are_no_unicode(tmp_path):
    make_folder(tmp_path, ("ant",), train=1, val=1)
    name = b"\xff\xfe.jpeg"
    source = tmp_path / "train" / "ant" / "0.JPEG"
    try:
        with open(bytes(source.parent) + b"/" + name, "xb") as file:
            file.write(source.read_bytes())
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    found = imagenet.load(tmp_path)
    with open(found.train.path(1), "rb") as file:
        assert file.read() == source.read_bytes()
    assert len(found.digest()) == 64


def test_the_digest_tells_folders_apart(tmp_path):
    make_folder(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    digest = lambda: imagenet.load(tmp_path / "b").digest()
    before = digest()
    assert before == imagenet.load(tmp_path / "a").digest()
    one = tmp_path / "b" / "val" / "ant" / "0.JPEG"
    one.rename(one.with_name("9.JPEG"))
    assert digest() != before


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def loose(folder):
    empty(folder / "val")
    for i in range(2):
        (folder / "val" / f"{i}.JPEG").write_bytes(b"")


WRONG = {
    "no folder": (shutil.rmtree, "does not exist; ImageNet would be a folder with train/"),
    "no train": (lambda d: shutil.rmtree(d / "train"), "train is missing; it would hold"),
    "no val": (lambda d: shutil.rmtree(d / "val"), "val is missing; it would hold"),
    "empty train": (lambda d: empty(d / "train"), "must hold a folder per class, got none"),
    "loose images": (loose, "got none, but 2 images; move them into class folders"),
    "empty class": (
        lambda d: empty(d / "train" / "bee"),
        "there is no image in bee",
    ),
    "less in val": (
        lambda d: shutil.rmtree(d / "val" / "cat"),
        "must have the same classes, but cat is in train and not in val",
    ),
    "less in train": (
        lambda d: [shutil.rmtree(d / "train" / x) for x in ("ant", "bee")],
        "must have the same classes, but ant, bee are in val and not in train",
    ),
    "no images": (
        lambda d: [path.write_bytes(b"") for path in (d / "train").rglob("*.JPEG")],
        "24 images in a row cannot be read, the last of them",
    ),
    "nothing to test": (
        lambda d: [path.write_bytes(b"no") for path in (d / "val").rglob("*.JPEG")],
        "2.JPEG: it is no JPEG, PNG, BMP or WebP image",
    ),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    change, message, tmp_path, capsys
):
    folder = make_folder(tmp_path / "data")
    change(folder)
    command = "imagenet-resnet50 --model digits-bn --data.crop 16 --batch-size 2"
    where = ["--data.dir", str(folder), "--runs", str(tmp_path / "runs")]
    assert main([*command.split(), *where]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert not (tmp_path / "runs").exists()


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "images.tar").write_bytes(b"")
    with pytest.raises(DataError, match="images.tar is not a folder; ImageNet would be"):
        imagenet.load(tmp_path / "images.tar")


@pytest.mark.parametrize(
    "option, message",
    [
        ("", "`data.dir` must name the folder with train/CLASS/*.JPEG"),
        (
            "--model cnn7 --data.dir DIR",
            "'cnn7' takes 28 x 28 images, 'imagenet' has",
        ),
        ("--batch-size 25 --data.dir DIR", "`batch_size` must be at most 24"),
        ("--data.shard --data.dir DIR", "`batch_size` must be at most 6"),
    ],
)
def test_wrong_options_are_one_line(option, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_folder(tmp_path / "data")
    arguments = option.replace("DIR", str(folder)).split()
    assert main(["imagenet-resnet50", *arguments]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["crop", "reader_threads", "read_ahead"])
def test_counts_are_positive(name):
    with pytest.raises(ValueError, match=f"`data.{name}` must be a positive int, got"):
        dataclasses.replace(CONFIG, data=DataConfig("imagenet", **{name: 0}))


def test_the_configuration_is_written_and_read_back(tmp_path):
    configuration.write(CONFIG, tmp_path / "config.json")
    assert configuration.read(tmp_path / "config.json") == CONFIG


def test_the_papers_settings():
    optimizer, method = CONFIG.optimizer, CONFIG.method
    assert (CONFIG.workers.nodes, CONFIG.workers.locals, CONFIG.batch_size) == (1, 4, 128)
    assert (optimizer.learning_rate, optimizer.weight_decay) == (0.1, 1e-4)
    assert not optimizer.momentum and not CONFIG.data.shard
    assert (method.local_pull, method.local_period, method.global_pull) == (0.1, 64, 0)
    assert CONFIG.data.crop == 224 and CONFIG.model == "resnet50"


# The network


@pytest.mark.parametrize("classes", [1000, 3])
def test_resnet50_has_its_published_size(classes):
    model, x = ResNet50(classes), jnp.zeros((2, 32, 32, 3))
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), x, train=False))
    count = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    assert count == 25_557_032 - 2049 * (1000 - classes)
    stages = [
        variables["params"][f"Bottleneck_{i}"]["Conv_2"]["kernel"].shape[-1]
        for i in (0, 2, 3, 6, 7, 12, 13, 15)
    ]
    assert stages == [256, 256, 512, 512, 1024, 1024, 2048, 2048]
    apply = lambda variables: model.apply(variables, x, True, mutable=["batch_stats"])
    logits, stats = jax.eval_shape(apply, variables)
    assert logits.shape == (2, classes)
    assert sum(leaf.size for leaf in jax.tree.leaves(stats)) == 53_120


def test_a_block_starts_as_the_identity():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 256)), jnp.float32)
    block = Bottleneck(64)
    variables = block.init(jax.random.key(0), x, False)
    np.testing.assert_array_equal(block.apply(variables, x, False), jnp.maximum(x, 0))
    assert "Conv_3" not in variables["params"]
    halved = Bottleneck(64, stride=2)
    variables = jax.eval_shape(lambda: halved.init(jax.random.key(0), x, False))
    shape = lambda name: variables["params"][name]["kernel"].shape
    assert shape("Conv_1") == (3, 3, 64, 64) and shape("Conv_3") == (1, 1, 256, 256)


@pytest.mark.parametrize(
    "stages", [((1, 8),), pytest.param(models.STAGES, marks=pytest.mark.slow)]
)
def test_resnet50_learns_from_a_batch(stages, monkeypatch):
    """On small images; the gradient reaches every parameter."""
    monkeypatch.setattr(models, "STAGES", stages)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    model, x, labels = ResNet50(3), draw(4, 32, 32, 3), jnp.array([0, 1, 2, 0])
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, train=False))
    # Not the initial values, whose compilation takes long, but of their size.
    size = lambda leaf: np.sqrt(2 * leaf.shape[-1] / np.prod(leaf.shape))  # by the inputs
    value = lambda leaf: draw(*leaf.shape) * size(leaf) if leaf.ndim > 1 else 0.3
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, value(leaf)), shapes["params"])
    stats = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes["batch_stats"])

    @jax.jit
    def step(params):
        def loss_of(params):
            variables = {"params": params, "batch_stats": stats}
            logits, new = model.apply(variables, x, True, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), new["batch_stats"]

        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        rate = 0.01 * loss / optax.tree.norm(grads, squared=True)  # the loss falls by 1 %
        return loss, new, grads, optax.tree.add_scale(params, -rate, grads)

    loss, new, grads, moved = step(params)
    assert float(step(moved)[0]) == pytest.approx(0.99 * float(loss), rel=0.005)
    for leaf in jax.tree.leaves((grads, new)):
        assert np.isfinite(leaf).all() and jnp.abs(leaf).max() > 0


def test_some_images_are_the_middles_of_files_that_can_be_read(tmp_path):
    make_folder(tmp_path, classes=("ant", "bee"), train=4, val=1)
    (tmp_path / "train" / "ant" / "1.JPEG").write_bytes(b"no image")
    files = imagenet.load(tmp_path, image_size=32).train
    images = imagenet.some(files, count=5, seed=0, size=32)
    again = imagenet.some(files, count=5, seed=0, size=32)
    np.testing.assert_array_equal(images.images, again.images)
    assert images.images.shape == (5, 32, 32, 3) and images.images.dtype == np.uint8
    every = imagenet.some(files, count=100, seed=1, size=32)
    assert np.bincount(every.labels).tolist() == [3, 4]
    for path in (tmp_path / "train").glob("*/*.JPEG"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="no image in .*train can be read"):
        imagenet.some(files, count=5, seed=0, size=32)
