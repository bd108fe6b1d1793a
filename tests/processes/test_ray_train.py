"""Lock step on Ray Train: options, the command of each process, and a failure."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import time
from unittest.mock import Mock

import psutil
import pytest
from ray.exceptions import RayActorError
from trainers import (
    FOR_EVER,
    PROXIES,
    SMALL,
    TINY,
    Trainers,
    assert_equal_to_the_bit,
    numbers,
)

import lsgd_jax as lj
from train.__main__ import main
from train.cluster import ray_train
from train.cluster.ray_train import Board, Job
from train.config import RayConfig, settings
from train.launch import rendezvous_options
from train.metrics import log
from train.process.exit_status import CRASHED, RESUME
from train.run import cli
from train.run.result import where


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ray.max-failures 1", "`ray.max_failures` must be left out without ray.process"),
        ("--ray.processes 2 --ray.stall-timeout 9", "`ray.stall_timeout` must be left out"),
        ("--ray.processes 2 --ray.min-processes 3", "must be at most ray.processes=2"),
        (
            "--ray.processes 3 --ray.min-processes 2",
            "`workers.nodes` must be a multiple of",
        ),
        ("--method async-lsgd --ray.processes 2", "`ray.processes` must be left out with"),
    ],
)
def test_options_that_exclude_one_another(options, message):
    with pytest.raises(ValueError) as caught:
        cli.parse(["digits", *options.split()])
    assert message in str(caught.value)


@pytest.mark.parametrize("begun", [False, True])
def test_a_process_gets_its_number_and_resumes_a_begun_run(tmp_path, begun, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    options = RayConfig(processes=4, min_processes=2, devices_per_process=2)
    files = tmp_path / "config.json", tmp_path / "metrics.jsonl"
    job = Job(("digits", "--seed", "1"), *files, nodes=8, options=options, cwd=".")
    if begun:
        (tmp_path / "config.json").write_text("{}")
    command = job.command("10.0.0.1:7000", size=3, rank=1)
    elastic = ["--ray.processes", "4", "--ray.min-processes", "2"]  # options of the driver
    parsed = cli.parse([x for x in [*command, *elastic] if x != "--resume"])
    assert (parsed.workers.nodes, parsed.distributed.process_id) == (6, 1)
    assert command[:5] == ["digits", "--seed", "1", "--run-dir", str(tmp_path)]
    assert ("--resume" in command) == begun
    assert command[command.index("--workers.nodes") + 1] == "6"
    assert {"--distributed.coordinator=10.0.0.1:7000", "--distributed.process-id=1"} <= set(
        command
    )
    environment = job.environment()
    assert environment["JAX_NUM_CPU_DEVICES"] == "2"
    assert environment["JAX_PLATFORMS"] == "cpu"
    with_gpus = dataclasses.replace(job, options=RayConfig(gpus_per_worker=1.0))
    assert "JAX_PLATFORMS" not in with_gpus.environment()


def test_the_board_keeps_the_highest_status_and_the_first_signal():
    board = Board()
    board.say("a")
    assert (board.take(), board.take(), board.status()) == (["a"], [], None)
    for number in (signal.SIGTERM, signal.SIGINT):
        board.ask(number)
    assert board.asked() == signal.SIGTERM
    for status in (0, 130, 0):
        board.end(status)
    assert board.status() == 130


def test_the_board_says_once_why_processes_are_restarted():
    board = Board()
    board.begin(3)
    board.miss(0)
    board.explain("process 1 ended with status -9")
    board.explain_by_silence()  # process 2 was ended by the restart
    board.begin(3)
    board.miss(0), board.miss(2)
    board.explain_by_silence(), board.explain_by_silence()
    board.begin(3)
    board.begin(3)
    causes = ["process 1 ended with status -9", "process 1 no longer answered"]
    causes.append("Ray has lost or replaced a process or a host")
    assert board.take() == [f"warning: {x}; the processes are restarted" for x in causes]


def test_progress_is_seen_by_changes_whatever_the_file_servers_clock_says(
    tmp_path, monkeypatch
):
    now = [1000.0]
    monkeypatch.setattr(ray_train.time, "monotonic", lambda: now[0])
    path = tmp_path / "metrics.jsonl"
    progress = ray_train.ProgressFile(path)
    for late in (2000, -2000):  # the clock of the file server
        now[0] += 100
        path.write_text(f"{late}\n")
        os.utime(path, ns=(0, int(1e9 * (time.time() - late))))
        assert progress.silence() == 0
        now[0] += 30
        assert progress.silence() == 30


def test_a_port_that_is_taken_meanwhile_is_no_wrong_usage(tmp_path, capsys):
    """Ray restarts the processes, at another port."""
    run = ["--run-dir", str(tmp_path / "run"), "--ray.processes", "2"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        where = f"127.0.0.1:{other.getsockname()[1]}"
        assert main(["digits", *run, *rendezvous_options(where, 2, 0)]) == CRASHED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: the processes could not meet: nothing can listen at {where}"
    )
    assert CRASHED not in ray_train.DELIBERATE and not (tmp_path / "run").exists()


def test_a_process_of_ray_does_not_say_how_to_resume(tmp_path):
    (tmp_path / "config.json").touch()
    text = "at step 7; checkpoints are kept in "
    for options, says in ([], True), (["--ray.processes", "2"], False):
        line = where(cli.parse(["digits", *options]), tmp_path, 7)
        assert line.startswith(text) and ("to resume" in line) == says


@pytest.mark.parametrize("begun", [False, True])
def test_the_loss_of_ray_is_one_line_that_says_how_to_go_on(
    begun, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "run"
    line = ["digits", "--ray.processes", "2", "--run-dir", str(folder)]
    again = "nothing was lost: the same command starts the run again"
    if begun:
        folder.mkdir()
        settings.write(cli.parse(line), folder / "config.json")
        line.append("--resume")
        again = f"to resume: python -m train digits --run-dir {folder} --resume"
    failing = Mock(side_effect=RayActorError(error_msg="a\n\tb"))
    monkeypatch.setattr(ray_train, "_follow", failing)
    health = contextlib.nullcontext(None)
    monkeypatch.setattr(lj.asynchronous.ray_engine, "cluster", lambda *_: health)
    assert main(line) == RESUME
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed == f"error: a b; {again}"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["gcs_server", "ray::TrainController"])
def test_kill_9_of_a_part_of_ray_ends_the_command_in_one_line(part, tmp_path, cache):
    run = tmp_path / "run"
    more = ["--run-dir", str(run), *FOR_EVER, "--ray.processes", "2"]
    arguments = [*SMALL, *more, "--ray.devices-per-process=2"]
    is_part = lambda x: part in f"{x.name()} {x.cmdline()[0]}"
    with Trainers(tmp_path / "out", arguments, [([], {})], cache, TINY) as driver:
        driver.until(lambda: list((run / "checkpoints").glob("[1-9]*[0-9]")))
        everything = driver.started()
        (victim,) = [x for x in everything if is_part(x)]
        victim.kill()
        assert driver.end() == [RESUME], driver.printed(0)
    left = psutil.wait_procs(everything, timeout=30)[1]
    assert not left, left
    last = driver.printed(0).splitlines()[-1]
    assert last.startswith("error: ")
    assert last.endswith(f"; to resume: python -m train digits --run-dir {run} --resume")
    assert not list(tmp_path.glob(".*.ray")) and not (run / "lock").exists()


@pytest.mark.slow
def test_kill_9_of_a_process_and_ctrl_c_of_the_driver(undisturbed, tmp_path, cache):
    """The group restarts. Ctrl-C then makes all processes save at the same step."""
    run = tmp_path / "run"
    more = ["--run-dir", str(run), "--steps", "1000000", "--ray.processes", "2"]
    arguments = [*SMALL, *more, "--ray.devices-per-process=2"]
    without_proxies = [([], dict.fromkeys(PROXIES, ""))]
    starts = lambda: log.read(run)["start"]
    saved = lambda: list((run / "checkpoints").glob("[1-9]*[0-9]"))
    trainers = lambda: [
        process
        for process in psutil.process_iter(["cmdline"])
        if {str(run), "--distributed.process-id=1"} <= set(process.info["cmdline"] or [])
    ]
    with Trainers(tmp_path / "out", arguments, without_proxies, cache, TINY) as driver:
        driver.until(saved)
        trainers()[0].kill()
        driver.until(lambda: len(starts()) == 2)
        begun = starts()[-1]["step"]
        assert begun > 0
        driver.until(lambda: any(int(path.name) > begun for path in saved()))
        driver.send(signal.SIGINT, 0)
        assert driver.end() == [130], driver.printed(0)
    printed = driver.printed(0)
    assert "process 1 ended with status -9; the processes are restarted" in printed
    last = max(int(path.name) for path in saved())
    assert f"stopped at step {last} after" in printed and not trainers()
    assert_equal_to_the_bit(numbers(run, last), undisturbed(last))
    assert not list(pathlib.Path(tmp_path).glob(".*.ray"))
