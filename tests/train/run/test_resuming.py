"""The command that a run prints for resuming it works when it is pasted."""

import dataclasses
import shlex

import pytest

from train import cli, launch, settings
from train import config as configuration
from train.run import resuming


def began(folder, *options, name="digits"):
    """The configuration of a run that began in a folder."""
    config = cli.parse([name, "--run-dir", str(folder), *options])
    folder.mkdir()
    settings.write(config, folder / "config.json")
    return config


def resumed(config, folder, start="python -m train"):
    """The configuration that the command gives for the run in a folder."""
    command = resuming.resume_command(config, folder)
    assert command.startswith(f"{start} ")
    return cli.parse(shlex.split(command.removeprefix(start)))


@pytest.mark.parametrize("name", ["run", "a b", "it's", "-x", "$HOME", "é"])
def test_the_command_names_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name
    config = began(folder, "--name", "other", "--method", "easgd", "--seed", "3")
    again = resumed(config, folder.relative_to(tmp_path))
    assert again.run_dir in (name, f"./{name}")
    run_dir = again.run_dir
    assert again == dataclasses.replace(config, run_dir=run_dir, resume=True)


def test_settings_that_changed_since_the_run_began_are_named(tmp_path):
    config = began(tmp_path / "run", name="cifar10-cnn7")
    workers = configuration.WorkersConfig(1, 3)
    data = dataclasses.replace(config.data, accept_other_files=True, dir="x")
    config = dataclasses.replace(config, steps=9, workers=workers, data=data, resume=True)
    assert resumed(config, tmp_path / "run") == config


def test_a_run_that_was_launched_is_launched_again(tmp_path, monkeypatch):
    start = "python -m train.launch --processes 2 --devices-per-process 1 --"
    monkeypatch.setenv(launch.LAUNCHER, start)
    of_process = "--distributed.coordinator a:1 --distributed.num-processes 2".split()
    of_process += "--distributed.process-id 0 --distributed.heartbeat-timeout 7".split()
    config = began(tmp_path / "run", *of_process)
    distributed = resumed(config, tmp_path / "run", start).distributed
    assert distributed == configuration.DistributedConfig(heartbeat_timeout=7)
    again = shlex.split(resuming.resume_command(config, tmp_path / "run"))[3:]
    assert launch.parse(again).arguments == again[again.index("--") + 1 :]


def test_the_command_names_a_folder_that_is_gone(tmp_path):
    config = cli.parse(["digits"])
    expected = f"python -m train digits --run-dir {tmp_path}/none --resume"
    assert resuming.resume_command(config, tmp_path / "none") == expected
