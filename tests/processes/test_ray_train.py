"""Lock step on Ray Train: options, the command of each process, and a failure."""

import dataclasses
import pathlib
import signal

import psutil
import pytest
from trainers import PROXIES, SMALL, TINY, Trainers, assert_equal_to_the_bit, numbers

from train import cli
from train.cluster.ray_train import Board, Job
from train.config import RayConfig
from train.metrics import log


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
def test_a_process_gets_its_number_and_resumes_a_begun_run(tmp_path, begun):
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
    options = RayConfig(gpus_per_worker=1.0)
    gpus = dataclasses.replace(job, options=options).environment()
    assert gpus.get("JAX_PLATFORMS") != "cpu" or "JAX_PLATFORMS" in environment


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


@pytest.mark.slow
def test_kill_9_of_a_process_and_ctrl_c_of_the_driver(undisturbed, tmp_path):
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
    with Trainers(tmp_path / "out", arguments, without_proxies, before=TINY) as driver:
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
