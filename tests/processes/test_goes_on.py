"""Trainers of which some are lost and come back, with `--min-workers`."""

import json
import signal

import numpy as np
import pytest
import tiny
from trainers import (
    HEARTBEAT_S,
    SLOWLY,
    TINY,
    Trainers,
    checkpoints,
    events,
    free_port,
    numbers,
    reported,
)

from train.process.exit_status import INTERRUPTED, RESUME, SUCCESS
from train.run import cli, loop
from train.run.open import open_run


PROCESSES = 3
SMALL = (
    "digits --workers.nodes 1 --workers.locals 3 --batch-size 4 --log-every 2 "
    "--checkpoint-every 4 --test-every 1000000"
).split()
MEAN = "--method local-sgd --method.period 6 --method.delay 3".split()
LEADER = (
    "--method lsgd --method.local-period 6 --method.global-period 6 --method.delay 3"
).split()
GOES_ON = [*MEAN, "--min-workers", "2"]
FOR_EVER = ["--steps", "1000000"]


def folder_of(run, process):
    return run / f"process-{process}" if process else run


@pytest.fixture
def start(tmp_path, cache):
    """Starts processes of one run by their numbers."""
    address = f"127.0.0.1:{free_port()}"
    started = []

    def start(*processes, options=GOES_ON, before=SLOWLY, run=tmp_path / "run"):
        meeting = {"coordinator": address, "num-processes": str(PROCESSES)}
        meeting["heartbeat-timeout"] = str(HEARTBEAT_S)
        common = [f"--distributed.{name}={value}" for name, value in meeting.items()]
        arguments = [*SMALL, *options, *common, "--run-dir", str(run)]
        each = [([f"--distributed.process-id={i}"], {}) for i in processes]
        folder = tmp_path / f"printed-{len(started)}"
        started.append(Trainers(folder, arguments, each, cache, TINY + before))
        return started[-1]

    yield start
    for trainers in started:
        trainers.__exit__()


def train_alone(*options):
    """Trains all workers in this process."""
    with pytest.MonkeyPatch.context() as patch:
        tiny.install(set=patch.setattr)
        loop.train(open_run(cli.parse([*SMALL, *options])))


def changes(run, kind):
    """The processes that were lost, or came in, as process 0 has told."""
    return [process for event in events(run, "processes") for process in event[kind]]


@pytest.mark.slow
def test_a_lost_process_ends_no_other_and_comes_back(start, tmp_path):
    """Then it leaves alone after SIGTERM, and Ctrl-C to process 0 stops the others."""
    run = tmp_path / "run"
    others = start(0, 1, options=[*GOES_ON, *FOR_EVER])
    lost = start(2, options=[*GOES_ON, *FOR_EVER])
    lost.until(lambda: reported(folder_of(run, 2)) > 8)
    lost.send(signal.SIGKILL, 0)
    lost.end()
    others.until(lambda: changes(run, "lost") == [2])
    again = start(2, options=[*GOES_ON, *FOR_EVER])
    others.until(lambda: changes(run, "came") == [2])
    came = events(run, "processes")[-1]["step"]
    again.until(lambda: reported(folder_of(run, 2)) > came + 12)
    assert "process 2 was lost at step" in others.printed(0)
    again.send(signal.SIGTERM, 0)
    assert again.end() == [RESUME], again.printed(0)
    others.until(lambda: changes(run, "lost") == [2, 2])
    others.send(signal.SIGINT, 0)
    statuses = others.end()
    assert statuses == [INTERRUPTED] * 2, others.printed(0)
    last = [max(checkpoints(folder_of(run, process))) for process in (0, 1)]
    assert last[0] == last[1]
    assert f"stopped at step {last[0]} after" in others.printed(0)


@pytest.mark.slow
def test_the_numbers_are_those_of_one_process_also_after_a_resumption(start, tmp_path):
    """A message is in flight when the run stops, and a leader is pulled to."""
    last = 40
    alone = tmp_path / "alone"
    train_alone(*LEADER, "--steps", str(last), "--run-dir", str(alone))
    run = tmp_path / "run"
    goes_on = [*LEADER, "--min-workers", "1"]
    for more in (["--steps", "25"], ["--steps", str(last), "--resume"]):
        trainers = start(0, 1, 2, options=[*goes_on, *more], before="")
        assert trainers.end() == [SUCCESS] * 3, trainers.printed(0)
    whole = numbers(alone, last)
    for process in range(PROCESSES):
        found = numbers(folder_of(run, process), last)
        params = [name for name in found if name.startswith("['params']")]
        assert params
        for name in params:
            np.testing.assert_array_equal(found[name], whole[name][process : process + 1])
    told = {event["step"]: event["leaders"] for event in events(run, "leaders")}
    expected = {event["step"]: event["leaders"] for event in events(alone, "leaders")}
    assert told and told == {step: expected[step] for step in told}


@pytest.mark.slow
def test_too_few_workers_save_and_end(start, tmp_path):
    run = tmp_path / "run"
    options = [*GOES_ON, *FOR_EVER]
    trainers = start(0, options=options)
    others = start(1, 2, options=options)
    trainers.until(lambda: reported(run) > 8)
    others.send(signal.SIGKILL, 0)
    others.send(signal.SIGKILL, 1)
    assert trainers.end() == [RESUME], trainers.printed(0)
    assert "1 workers live, fewer than min_workers=2" in trainers.printed(0)
    last = max(checkpoints(run))
    assert last > 8 and json.loads((run / "config.json").read_text())["min_workers"] == 2


@pytest.mark.slow
def test_other_settings_are_refused_and_the_others_go_on(start, tmp_path):
    run = tmp_path / "run"
    others = start(0, 1, options=[*GOES_ON, "--steps", "60"])
    wrong = start(2, options=[*GOES_ON, "--steps", "60", "--batch-size", "8"])
    assert wrong.end() == [2]
    assert "`batch_size` must be the same in all processes, got 4 in" in wrong.printed(0)
    assert others.end() == [SUCCESS] * 2, others.printed(0)
    assert max(checkpoints(run)) == 60
