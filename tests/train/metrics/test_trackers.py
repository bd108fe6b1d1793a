"""Trackers: Weights & Biases and trackio by modules that are made up."""

import resource
import shutil
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import tiny
from harness import mostly_slow

from train.__main__ import main
from train.metrics import log, trackers
from train.run import open as opening


@pytest.fixture
def service(monkeypatch):
    """Makes up a module that records what it is told."""

    def service(name):
        made = ModuleType(name)
        made.told, made.ended = [], []
        log = lambda sent, **step: made.told.append({**sent, **step})
        run = SimpleNamespace(log=log, finish=lambda: made.ended.append(True))
        made.init = lambda **options: vars(made).update(options=options) or run
        monkeypatch.setitem(sys.modules, name, made)
        return made

    monkeypatch.setattr(opening, "check_installed", lambda *_: None)
    return service


@pytest.fixture
def wandb(service):
    return service("wandb")


COMMAND = (
    "digits --workers.nodes 1 --workers.locals 2 --steps 4 --test-every 9 --log-every 2 "
    "--batch-size 8 --wandb project --run-dir"
).split()


@pytest.mark.parametrize("name", mostly_slow(trackers.SERVICES, fast=["trackio"]))
def test_a_service_receives_the_scalars(name, service, tmp_path, monkeypatch):
    tiny.install(share=True, set=monkeypatch.setattr)
    folder, wandb = tmp_path / "my run", service(name)
    command = ["--" + name if x == "--wandb" else x for x in COMMAND]
    assert main([*command, str(folder)]) == 0
    options = wandb.options
    assert options["project"] == "project" and options["name"].startswith("my run")
    kept = (folder / f"{name}_id.txt").read_text()
    assert kept == options["id" if name == "wandb" else "name"]
    assert options["config"]["workers.locals"] == 2 and options["resume"] == "allow"
    events = log.read(folder)
    losses = [sent["train/loss"] for sent in wandb.told if "train/loss" in sent]
    assert losses == [event["loss"] for event in events["train"]] and len(losses) == 2
    steps = [sent["step"] for sent in wandb.told if "test/center_error" in sent]
    assert steps == [4] and wandb.ended == [True]


def test_a_project_may_belong_to_a_team(wandb, tmp_path, monkeypatch):
    tiny.install(share=True, set=monkeypatch.setattr)
    command = ["team/own" if x == "project" else x for x in COMMAND]
    assert main([*command, str(tmp_path / "run")]) == 0
    assert (wandb.options["entity"], wandb.options["project"]) == ("team", "own")


@pytest.mark.slow
def test_a_run_keeps_its_id_and_sends_no_step_twice(wandb, tmp_path, monkeypatch):
    """A killed run leaves events after its checkpoint, and may be moved."""
    tiny.install(share=True, set=monkeypatch.setattr)
    folder, ids = tmp_path / "run", []
    for name in "run", "moved":
        assert main([*COMMAND, str(tmp_path / name)]) == 0
        ids.append(wandb.options["id"])
    shutil.rmtree(tmp_path / "moved")
    killed = {"kind": "train", "step": 6, "seconds": 9.0, "loss": 0.5}
    trackers.JsonLines(folder / log.METRICS).write(killed)
    folder.rename(tmp_path / "moved")
    wandb.told.clear()
    again = [*COMMAND, str(tmp_path / "moved"), "--resume", "--steps", "8"]
    assert main(again) == 0
    assert wandb.options["id"] == ids[0] != ids[1]
    assert [sent["step"] for sent in wandb.told if "train/loss" in sent] == [8]
    assert [sent["step"] for sent in wandb.told if "test/center_error" in sent] == [8]


def test_an_error_of_weights_and_biases_stops_nothing(wandb, tmp_path, monkeypatch, capsys):
    tiny.install(share=True, set=monkeypatch.setattr)
    made = wandb.init()
    made.log = Mock(side_effect=RuntimeError("no network\nat all"))
    assert main([*COMMAND, str(tmp_path / "run")]) == 0
    said = "warning: nothing is sent to Weights & Biases any more: no network at all\n"
    printed = capsys.readouterr().out
    assert printed.count(said) == 1 and "everything is in" in printed


def test_without_wandb_one_line_says_how_to_install_it(refusal, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install -e ".[wandb]"' in refusal(main, [*COMMAND, "run"])


def test_a_line_that_a_full_disk_cut_off_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    event = lambda step: {"kind": "train", "step": step, "seconds": 0.5, "loss": 0.25}
    tracker = trackers.JsonLines(path)
    tracker.write(event(1))
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, kept[1]))
    try:
        with pytest.raises(OSError):
            tracker.write(event(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    tracker.write(event(3))
    assert [event["step"] for event in log.read(tmp_path)["train"]] == [1, 3]
