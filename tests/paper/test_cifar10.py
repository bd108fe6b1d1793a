"""The paper's CIFAR-10 comparison, on a few made-up images."""

import csv

import numpy as np
import pytest
import tiny

from paper import cifar10
from train import compare
from train.data import transforms
from train.data.arrays import Dataset, Images
from train.task import experiment, models
from train.task.datasets import check_model_fits
from train.task.experiment import Experiment
from train.task.models import MODELS


OPTIONS = "--batch-size 2 --steps 4 --test-every 2 --log-every 2 --seeds 1".split()


@pytest.fixture
def made_up(monkeypatch):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(16, 32, 32, 3), dtype=np.uint8)
    some = Images(images, rng.integers(0, 10, size=16, dtype=np.int32))
    loaded = Dataset(train=some, test=some, num_classes=10), transforms.cifar10()
    for module in compare, experiment:
        monkeypatch.setattr(module, "load_dataset", lambda config: loaded)
    monkeypatch.setattr(models, "MODELS", MODELS | {"cnn7": tiny.Tiny})


@pytest.mark.slow
def test_the_tables_contain_the_published_figures(made_up, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["--methods", "lsgd,sgd", "--out", str(out), *OPTIONS]
    command += ["--checkpoint-every", "4"]
    assert cifar10.main(command) == 0
    printed = capsys.readouterr().out
    for name in ("cifar10", "reached"):
        assert (out / f"{name}.md").read_text() in printed
    with open(out / "cifar10.csv") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert rows["lsgd"]["published: end (best)"] == "17.6 (17.3)"
    assert rows["sgd"]["published: end (best)"] == "19.9 (19.2)"
    assert rows["sgd"]["changes of the leader"] == "–"
    assert (out / "cifar10.png").read_bytes()[:4] == b"\x89PNG"
    assert (out / "lsgd-0" / "config.json").is_file()


def test_grids_and_settings_of_the_paper(tmp_path):
    configs, setting, _ = cifar10.parse(["--out", str(tmp_path), "--workers", "16"])
    assert setting == ("cnn7", 16, "paper")
    lsgd = configs["lsgd", 0]
    assert (lsgd.workers.nodes, lsgd.workers.locals) == (4, 4)
    assert (lsgd.method.local_period, lsgd.method.global_period) == (64, 128)
    assert lsgd.method.local_pull == lsgd.method.global_pull == 0.1
    assert configs["easgd", 0].method.period == configs["downpour", 0].method.period == 64
    assert configs["lars", 0].optimizer.name == "lars"
    single = configs["sgd", 0].workers
    assert (single.nodes, single.locals) == (1, 1)
    assert all(config.optimizer.momentum is None for config in configs.values())
    single, _, _ = cifar10.parse(["--out", str(tmp_path), "--methods", "lsgd"])
    assert single["lsgd", 0].method.global_pull == 0


def test_the_later_recipe_has_nesterovs_momentum(tmp_path):
    command = "--workers 12 --model resnet20 --recipe nesterov --out".split()
    configs, setting, _ = cifar10.parse([*command, str(tmp_path)])
    assert cifar10.published(setting)["lsgd"] == "8.5"
    for config in configs.values():
        assert config.optimizer.nesterov and config.optimizer.momentum == 0.9
        assert config.optimizer.drop_at == (15_000,)


def test_every_network_fits_its_images():
    for model in cifar10.GOALS:
        configs, _, _ = cifar10.parse(["--model", model, "--methods", "sgd", "--out", "x"])
        crop = configs["sgd", 0].data.crop
        check_model_fits(configs["sgd", 0], (1, crop, crop, 3))


def test_leader_changes_are_counted(tmp_path):
    leaders = [0, 0, 3, 1, 1]
    lines = [
        f'{{"kind": "leaders", "step": {step}, "seconds": 0, "level": "node", '
        f'"leaders": [{leader}, 7]}}\n'
        for step, leader in enumerate(leaders)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert cifar10.leader_changes(tmp_path) == "2 of 5"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--model cnn8 --out x", "--model must be one of cnn7, resnet20, vgg16"),
        ("--workers 5 --out x", "--workers must be one of 4, 12, 16"),
        ("--methods lsgd,adam --out x", "`methods` must be one of 'lsgd', 'easgd'"),
        ("--out x --workers.nodes 3", "--workers.nodes must be left out"),
        ("--out x", "`data.dir` must name the folder"),
    ],
)
def test_wrong_usage(arguments, message, refusal):
    assert message in refusal(cifar10.main, arguments.split())


def test_a_single_worker_needs_one_device(made_up):
    configs, _, _ = cifar10.parse(["--methods", "sgd", "--out", "x", *OPTIONS])
    assert Experiment(configs["sgd", 0]).workers.num_workers == 1
