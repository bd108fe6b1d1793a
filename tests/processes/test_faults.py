"""Faults injected into several processes: no process hangs, and no result is lost."""

import random
import signal
import sys
import time

import pytest
from trainers import (
    END,
    FOR_EVER,
    HEARTBEAT_S,
    SLOWLY,
    assert_equal_to_the_bit,
    by_open_mpi_5,
    by_options,
    by_slurm,
    checkpoints,
    numbers,
    reported,
)

from train.metrics import log as records
from train.process.exit_status import CRASHED, RESUME, SIGNALED


def assert_told(trainers, lost, run):
    """Checks that the survivors end in time, with one line or aborted by jax.

    Lines that jax prints itself may follow.
    """
    statuses = trainers.end(limit=4 * HEARTBEAT_S)
    for i, status in enumerate(statuses):
        if i == lost:
            continue
        assert status in (RESUME, -signal.SIGABRT), trainers.printed(i)
        if status == RESUME:
            lines = trainers.printed(i).splitlines()
            (told,) = [line for line in lines if line.startswith("error: ")]
            assert told.startswith("error: another process was lost at step ")
            assert f"; checkpoints are kept in {run}/checkpoints; to resume: " in told
            assert f"python -m train digits --run-dir {run} --resume" in told
    return statuses


def assert_all_saved(trainers, run):
    """Checks that all stopped at the same step, which only process 0 reports."""
    last = max(checkpoints(run))
    assert f"stopped at step {last} after" in trainers.printed(0)
    assert "), saved\n" in trainers.printed(0)
    assert "to resume: " in trainers.last_line(0)
    assert "to resume" not in trainers.printed(1)


@pytest.mark.slow
def test_random_processes_are_killed_repeatedly(start, check_resumed, tmp_path):
    """kill -9 at random steps; the run ends bit-identical to an undisturbed one."""
    run, chance = tmp_path / "run", random.Random(0)
    for more in ([], ["--resume"]):
        trainers = start(4, *FOR_EVER, *more)
        wanted = reported(run) + chance.randrange(4, 12)
        trainers.until(lambda wanted=wanted: reported(run) >= wanted)
        lost = chance.randrange(4)
        trainers.send(signal.SIGKILL, lost)
        assert_told(trainers, lost, run)
    last = max(checkpoints(run))
    check_resumed(2)
    begins = [event["step"] for event in records.read(run)["start"]]
    assert begins[-1] == last and len(begins) == 3


@pytest.mark.slow
def test_a_process_that_crashes_says_why_and_ends_the_others(start, tmp_path):
    """An unexpected error is raised in process 1 only."""
    breaks = (
        "import itertools, sys; from train.cluster.signals import StopSignals as S; "
        "asked = S.asked; n = itertools.count(1); S.asked = lambda self: 1 / (next(n) < 7 "
        "or '--distributed.process-id=0' in sys.argv) and asked(self); "
    )
    trainers = start(2, *FOR_EVER, before=SLOWLY + breaks)
    trainers.until(lambda: reported(tmp_path / "run") >= 4)
    assert assert_told(trainers, 1, tmp_path / "run")[1] == CRASHED
    assert "Traceback" in trainers.printed(1) and "Traceback" not in trainers.printed(0)
    last = trainers.last_line(1)
    assert last.startswith("error: this process crashed at step 7;")
    assert "(ZeroDivisionError: division by zero)" in last


@pytest.mark.slow
def test_process_0_is_killed_while_a_checkpoint_is_written(start, check_resumed, tmp_path):
    """The run resumes from the checkpoint before."""
    run = tmp_path / "run"
    trainers = start(2, *FOR_EVER)
    unfinished = lambda: list((run / "checkpoints").glob("[0-9]*.orbax-checkpoint-tmp*"))
    trainers.until(lambda: checkpoints(run) and unfinished())
    trainers.send(signal.SIGKILL, 0)
    assert_told(trainers, 0, run)
    (torn,) = unfinished()
    before = checkpoints(run)
    assert int(torn.name.partition(".")[0]) not in before
    assert "cannot be read" not in check_resumed(2).printed(0)
    assert [event["step"] for event in records.read(run)["start"]] == [0, max(before)]


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_the_launcher_says_how_to_resume(start, tmp_path, process):
    """Whatever the processes still say: jax may abort those that are left."""
    launcher = [sys.executable, "-m", "train.launch", "--processes", "2", "--"]
    trainers = start(1, *FOR_EVER, by=lambda _: [([], {})], program=[launcher])
    trainers.until(lambda: checkpoints(tmp_path / "run"))
    number = f"--distributed.process-id={process}"
    (lost,) = [child for child in trainers.started() if number in child.cmdline()]
    lost.kill()
    assert trainers.end() == [SIGNALED + signal.SIGKILL], trainers.printed(0)
    command = f"python -m train.launch --processes 2 -- digits --run-dir {tmp_path}/run"
    line = f"error: process {process} was ended by SIGKILL; to resume: {command} --resume"
    assert trainers.last_line(0).startswith(line)


@pytest.mark.slow
def test_a_paused_process_is_waited_for(start, check_resumed, tmp_path):
    """Started by Slurm, resumed by Open MPI."""
    run = tmp_path / "run"
    trainers = start(2, *FOR_EVER, by=by_slurm)
    trainers.until(lambda: reported(run) >= 4)
    trainers.send(signal.SIGSTOP, 1)
    time.sleep(HEARTBEAT_S / 3)
    stopped_at = reported(run)
    time.sleep(0.5)
    assert reported(run) == stopped_at
    trainers.send(signal.SIGCONT, 1)
    trainers.until(lambda: reported(run) >= stopped_at + 4)

    trainers.send(signal.SIGTERM, 1)
    assert trainers.end(limit=60) == [RESUME, RESUME], trainers.printed(0)
    assert_all_saved(trainers, run)
    check_resumed(2, by=by_open_mpi_5)


@pytest.mark.slow
def test_a_process_late_for_the_first_step_is_waited_for(start, undisturbed, tmp_path):
    """As if its first step took long to compile; gloo alone would give up after 30 s."""
    late = (
        "import sys, time; from train.task.experiment import Experiment; "
        "whole = Experiment.batches; Experiment.batches = lambda *a: "
        "(time.sleep(36 * ('--distributed.process-id=1' in sys.argv)), whole(*a))[1]; "
    )
    trainers = start(2, "--steps", str(END), before=late)
    assert trainers.end() == [0, 0], trainers.printed(0)
    assert_equal_to_the_bit(numbers(tmp_path / "run", END), undisturbed(END))


@pytest.mark.slow
def test_a_process_that_cannot_write_loses_only_checkpoints(start, tmp_path):
    full = (
        "import resource, sys; '--distributed.process-id=1' in sys.argv and "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18)); "
    )
    wide = (
        "import tiny; tiny.install(tiny.Wide); "
        "from train.run import checkpoints; checkpoints.BARRIER_S = 5; "
    )
    trainers = start(2, "--steps", "8", before=full, tiny=wide)
    assert trainers.end() == [1, 1], trainers.printed(0)
    words = "warning: the checkpoint of step {} was not written: {}"
    for step in (4, 8):
        assert words.format(step, "") in trainers.printed(0)  # by Orbax's timeout
        assert words.format(step, "") in trainers.printed(1)
    assert "after 8 steps" in trainers.printed(0)
    assert checkpoints(tmp_path / "run") == []


# At the start


@pytest.mark.slow
def test_processes_that_differ_do_not_start_a_run(start, tmp_path):
    """They have different numbers of devices; other settings are tested elsewhere."""

    def by(count):
        for i, (options, _) in enumerate(by_options(count)):
            yield options, {"JAX_NUM_CPU_DEVICES": f"{i + 1}"}

    trainers = start(2, by=by, before="")
    assert trainers.end(150) == [2, 2], trainers.printed(0)
    for i in range(2):
        (line,) = [x for x in trainers.printed(i).splitlines() if x.startswith("error: ")]
        assert line == trainers.last_line(i)
        assert "number of devices, got" in line and line.endswith(" in process 1")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_that_wait_in_vain_exit_with_one_line(start):
    """Only two of three processes are started."""
    trainers = start(2, "--distributed.start-timeout=5", by=lambda _: by_options(3)[:2])
    assert trainers.end(60) == [RESUME, RESUME], trainers.printed(0)
    for i in range(2):
        assert trainers.printed(i).startswith("error: not all processes have met at 127")
        assert trainers.printed(i).count("\n") == 1


@pytest.mark.slow
def test_a_host_whose_name_does_not_resolve_is_named(start):
    """Without the check, jax ends with a traceback."""
    trainers = start(2, before="import socket; socket.gethostname = lambda: 'h.invalid'; ")
    assert trainers.end(60) == [2, 2], trainers.printed(0)
    for i in range(2):
        assert trainers.printed(i).startswith("error: the name of this host must resolve")
        assert trainers.printed(i).count("\n") == 1


@pytest.mark.slow
def test_a_second_process_with_a_number_does_not_disturb_the_run(start, tmp_path):
    """Nor does another run with the same port."""
    each = by_options(2)
    run = start(2, "--steps", "150", by=lambda _: each)
    run.until(lambda: reported(tmp_path / "run") >= 4)
    others = start(2, by=lambda _: each)
    assert others.end(60) == [2, 2], others.printed(1)
    assert "Address already in use; is the port taken" in others.last_line(0)
    words = "another process of this host is number 1 at 127.0.0.1:"
    assert others.printed(1).startswith(f"error: started by hand, but {words}")
    assert others.printed(1).count("\n") == 1
    assert run.end() == [0, 0], run.printed(0)
