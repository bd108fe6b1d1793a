"""The configuration: written and read back, what differs, run folders."""

import dataclasses

import pytest

from configs import cifar10_cnn7, cifar10_resnet20, cifar10_vgg16, digits
from train import config as configuration
from train.cluster.session import Session
from train.config import Config
from train.run import folder as run_folder


@pytest.mark.parametrize(
    "config",
    [m.CONFIG for m in (digits, cifar10_cnn7, cifar10_resnet20, cifar10_vgg16)],
    ids=lambda c: c.name,
)
def test_written_and_read_back(config, tmp_path):
    configuration.write(config, tmp_path / "config.json")
    assert configuration.read(tmp_path / "config.json") == config
    with pytest.raises(FileExistsError):
        configuration.write(config, tmp_path / "config.json")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2, "name": "x"}', '{"format": 2, "nonsense": 1}']
)
def test_a_file_that_holds_no_configuration(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="holds no configuration of a run"):
        configuration.read(tmp_path / "config.json")


def test_a_run_of_an_older_version_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "digits"}')
    with pytest.raises(
        ValueError, match="is of a run in format 1, whose .*format 2"
    ) as seen:
        configuration.read(tmp_path / "config.json")
    assert "\n" not in str(seen.value)


def test_the_length_of_a_run_is_part_of_a_cosine():
    cosine = configuration.OptimizerConfig(schedule="cosine")
    old = dataclasses.replace(digits.CONFIG, optimizer=cosine)
    longer = dataclasses.replace(old, steps=old.steps + 1)
    changes = ["steps: the run has 500, the command says 501"]
    assert configuration.differences(old, longer) == changes


def test_only_how_long_and_what_is_reported_may_change():
    old = digits.CONFIG
    free = dataclasses.replace(old, steps=9, log_every=1, run_dir="x", resume=True)
    assert configuration.differences(old, free) == []
    workers = configuration.WorkersConfig(nodes=3, locals=5)
    others = dataclasses.replace(old, workers=workers)
    assert configuration.differences(old, others) == []
    free = configuration.FREE_ON_RESUME - configuration.WORKERS
    assert len(configuration.differences(old, others, free)) == 2
    data = dataclasses.replace(old.data, shard=True)
    other = dataclasses.replace(old, data=data, batch_size=7)
    assert len(configuration.differences(old, other)) == 2


def test_new_run_folders_never_meet(tmp_path):
    config = dataclasses.replace(digits.CONFIG, runs=str(tmp_path))
    first, second = (run_folder.create(config, Session.single()) for _ in range(2))
    assert first != second and first.parent == second.parent == tmp_path
    assert run_folder.newest(str(tmp_path), "digits") == second


def test_the_newest_run_is_of_the_same_experiment(tmp_path):
    config = dataclasses.replace(digits.CONFIG, runs=str(tmp_path))
    folder = run_folder.create(config, Session.single())
    other = dataclasses.replace(cifar10_cnn7.CONFIG, runs=str(tmp_path))
    run_folder.create(other, Session.single())
    assert run_folder.newest(str(tmp_path), "digits") == folder


@pytest.mark.parametrize(
    "experiment", [cifar10_cnn7, cifar10_resnet20, cifar10_vgg16], ids=lambda m: m.__name__
)
def test_the_papers_settings(experiment):
    config = experiment.CONFIG
    assert isinstance(config, Config)
    assert (config.batch_size, config.optimizer.learning_rate) == (128, 0.1)
    assert (config.optimizer.weight_decay, config.optimizer.momentum) == (1e-4, None)
    assert (config.method.local_period, config.method.local_pull) == (64, 0.1)
