"""What the launcher knows of the trainer's configuration."""

import pathlib
import types

import pytest

from train.tools import launch, launch_plan


def test_a_new_run_gets_its_folder_from_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = launch_plan.make(["digits", "--seed", "3"])
    option, folder = plan.folder
    assert option == "--run-dir" and folder.startswith("runs/digits-")
    assert plan.begun == f"{folder}/config.json" and plan.resume == ["--resume"]
    assert not plan.survive and not pathlib.Path("runs").exists()


def test_a_folder_that_is_named_stays(tmp_path):
    plan = launch_plan.make(["digits", "--run-dir", str(tmp_path)])
    assert plan.folder == [] and plan.begun == str(tmp_path / "config.json")


@pytest.mark.parametrize("grid", [("2", "4"), ("3", "5")])
def test_a_run_that_lost_nodes_is_restarted_with_all_of_them(tmp_path, grid):
    nodes, locals = grid
    workers = ["--workers.nodes", nodes, "--workers.locals", locals]
    given = workers if grid != ("2", "4") else []
    run = ["--run-dir", str(tmp_path)]
    plan = launch_plan.make(["digits", *run, *given, "--distributed.survive"])
    assert plan.survive and plan.resume == ["--resume", *workers]


@pytest.mark.slow  # the trainer's imports, once more
def test_the_trainer_reads_its_command_line_in_a_process_of_its_own(tmp_path):
    assert_read(tmp_path)


@pytest.fixture
def in_this_process(monkeypatch):
    """What is to run in a process of its own runs here."""

    def run(command, **_):
        status = launch_plan.main(*map(str, command[3:]))
        return types.SimpleNamespace(returncode=status)

    monkeypatch.setattr(launch_plan.subprocess, "run", run)


def test_the_plan_comes_back_as_it_was_made(tmp_path, in_this_process):
    assert_read(tmp_path)


def assert_read(folder):
    command = ["digits", "--run-dir", str(folder), "--distributed.survive"]
    expected = launch_plan.make(command)._asdict()
    assert launch_plan.of_trainer(command)._asdict() == expected


def test_wrong_usage_is_said_once_and_nothing_is_started(in_this_process, capsys):
    assert launch.main(["--processes", "2", "--", "digits", "--seed", "-1"]) == 2
    message = "error: `seed` must be in [0, 2**32), got seed=-1"
    printed = capsys.readouterr().err
    assert printed.startswith(message) and printed.count("\n") == 1
