"""The command that a run prints for resuming it works when it is pasted."""

import dataclasses
import shlex
import signal

import pytest

from train import launch
from train.config import schema as configuration
from train.config import settings
from train.run import cli, folder, resuming
from train.run.result import Result, last_lines, where


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


OF_LOCK_STEP = {
    "workers.inside": ("fsdp=2", "model=1"),
    "workers.devices": None,
    "static_phases": False,
    "trackio": "a b",
    "wandb": "-x",
    "ray.processes": 2,
    "ray.devices_per_process": 4,
    "ray.min_processes": 1,
    "ray.address": "a:1",
    "distributed.cluster": "none",
}
OF_ASYNCHRONOUS = {"ray.object_store": 1.5, "ray.address": None, "ray.gpus_per_worker": 0}
OF_DATA = {
    "text": {"data.files": ("a b", "c")},
    "translation": {"data.source": ("a", "b"), "data.target": ("c", "d")},
    "imagenet-resnet50": {"data.dir": "-x", "data.reader_threads": 3},
    "cifar10-cnn7": {"data.dir": "x", "data.accept_other_files": True},
    "digits": {},
}


def other(name, value, given):
    """Another value of a setting."""
    if name in given:
        return given[name]
    if isinstance(value, bool):
        return not value
    return value * 2 if isinstance(value, int | float) else value


@pytest.mark.parametrize("name", OF_DATA)
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_every_setting_that_may_change_is_named(
    tmp_path, monkeypatch, name, is_asynchronous
):
    start = "python -m train.launch --processes 2 --"  # names the rendezvous, too
    monkeypatch.setenv(launch.LAUNCHER, start)
    method = ["--method", "async-lsgd"] if is_asynchronous else []
    config = began(tmp_path / "run", *method, name=name)
    given = OF_DATA[name] | (OF_ASYNCHRONOUS if is_asynchronous else OF_LOCK_STEP)
    own, values = configuration.SETTINGS, configuration.fields(config)
    applies = lambda x: all(
        note.applies(values[note.choice])
        for note in own[x].notes
        if isinstance(note, configuration.Only)
    )
    free = set(filter(applies, configuration.FREE_ON_RESUME - resuming.LEFT_OUT))
    if config.optimizer.schedule == "cosine":
        free.remove("steps")  # the learning rate depends on it
    changes = {x: other(x, values[x], given) for x in free}
    changed = settings.changed(config, {**changes, "resume": True})
    assert resumed(changed, tmp_path / "run", start) == dataclasses.replace(
        changed, run_dir=str(tmp_path / "run")
    )


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


def test_a_folder_that_is_gone_is_not_resumed(tmp_path):
    config = cli.parse(["digits"])
    stopped = Result(tmp_path / "none", 3, 1.0, None, signal.SIGINT, saved=False)
    for line in (last_lines(stopped, config), where(config, tmp_path / "none", 3)):
        assert line.endswith(
            "none is gone (deleted, moved or not mounted): nothing can be resumed"
        )
        assert "--resume" not in line and "kept" not in line
    expected = f"python -m train digits --run-dir {tmp_path}/none --resume"
    assert resuming.resume_command(config, tmp_path / "none") == expected


def test_the_folder_of_a_process_stands_below_that_of_process_0(tmp_path):
    """On a file system of its own, both are made, and the command names the first one."""
    delayed = "--method diloco --method.delay 2 --min-workers 1".split()
    config = cli.parse(["digits", *delayed])
    main = tmp_path / "run"
    for _ in range(2):  # it is there when the process starts again
        own = folder.of_process(config, 2, main)
        assert own == main / "process-2"
        assert settings.read(own / "config.json") == settings.read(main / "config.json")
    assert folder.of_all(config, own) == main == folder.of_all(config, main)
    assert f"--run-dir {main} --resume" in resuming.resume_command(config, own)
    (main / "process-3").write_text("")
    with pytest.raises(ValueError, match="process-3 cannot be made: File exists"):
        folder.of_process(config, 3, main)
