"""What goes wrong with several processes, done to them: nothing hangs, nothing is lost."""

import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import certificates
import jax
import pytest
from trainers import (
    END,
    FOR_EVER,
    HEARTBEAT_S,
    LIMIT_S,
    SLOWLY,
    SMALL,
    TINY,
    assert_equal_to_the_bit,
    by_open_mpi_5,
    by_options,
    by_slurm,
    checkpoints,
    environment,
    numbers,
    reported,
    train_here,
)

from train.cluster.exit_status import CRASHED, LOST
from train.metrics import log as records


def assert_named(trainers, survivors, lost, run):
    """The survivors end in time; their last line names the lost one and how to go on."""
    statuses = trainers.end(limit=3 * HEARTBEAT_S)
    for i in survivors:
        last = trainers.last_line(i)
        assert statuses[i] == LOST, trainers.printed(i)
        assert last.startswith(f"error: process {lost} (host "), trainers.printed(i)
        assert ") was lost at step " in last
        assert f"; checkpoints are kept in {run}/checkpoints; to go on: " in last
        assert last.endswith(f"python -m train digits --run-dir {run} --resume")


def assert_all_saved(trainers, run):
    """They have stopped at the same step; the first process speaks for all."""
    last = max(checkpoints(run))
    assert f"stopped at step {last} after" in trainers.printed(0)
    assert ", saved; to go on: " in trainers.last_line(0)
    assert "to go on" not in trainers.printed(1)


def stopped_by_sigterm(start, run):
    """Two processes, of which one gets the signal: the step that all have saved."""
    trainers = start(2, *FOR_EVER)
    trainers.until(lambda: reported(run) >= 6)
    trainers.send(signal.SIGTERM, 1)
    assert trainers.end() == [0, 0], trainers.printed(0)
    assert_all_saved(trainers, run)
    return max(checkpoints(run))


def test_sigterm_to_one_stops_all(start, undisturbed, tmp_path):
    """Resumed in one process: the same numbers to the bit at the end."""
    run = tmp_path / "run"
    last = stopped_by_sigterm(start, run)
    train_here("--resume", "--steps", str(END), "--run-dir", str(run))
    assert [event["step"] for event in records.read(run)["start"]] == [0, last]
    assert_equal_to_the_bit(numbers(run, END), undisturbed(END))


@pytest.mark.slow
def test_sigterm_to_one_stops_all_and_kill_9_of_one_ends_all(start, undisturbed, tmp_path):
    """Resumed each time: the same numbers to the bit at the end."""
    run = tmp_path / "run"
    saved = stopped_by_sigterm(start, run)
    trainers = start(2, *FOR_EVER, "--resume")
    trainers.until(lambda: reported(run) >= saved + 6)
    trainers.send(signal.SIGKILL, 1)
    assert_named(trainers, {0}, 1, run)
    last = max(checkpoints(run))
    train_here("--resume", "--steps", str(END), "--run-dir", str(run))
    assert [event["step"] for event in records.read(run)["start"]] == [0, saved, last]
    assert_equal_to_the_bit(numbers(run, END), undisturbed(END))


@pytest.mark.slow
def test_one_of_four_is_killed_again_and_again(start, undisturbed, tmp_path):
    """kill -9 at random steps: the same numbers to the bit at the end."""
    run, chance, kills = tmp_path / "run", random.Random(0), 5
    for kill in range(kills):
        trainers = start(4, *FOR_EVER, *["--resume"] * (kill > 0))
        wanted = reported(run) + chance.randrange(4, 12)
        trainers.until(lambda wanted=wanted: reported(run) >= wanted)
        lost = chance.randrange(4)
        trainers.send(signal.SIGKILL, lost)
        assert_named(trainers, {0, 1, 2, 3} - {lost}, lost, run)
    last = max(checkpoints(run))
    steps = last + 10
    trainers = start(4, "--resume", "--steps", str(steps), before="")
    assert trainers.end() == [0, 0, 0, 0], trainers.printed(0)
    begins = [event["step"] for event in records.read(run)["start"]]
    assert begins[-1] == last and len(begins) == kills + 1
    assert_equal_to_the_bit(numbers(run, steps), undisturbed(steps))


@pytest.mark.slow
def test_one_that_crashes_ends_the_others_at_once_and_says_why(start, tmp_path):
    """By an unexpected error, which only process 1 has."""
    breaks = (
        "import sys; from train.cluster.signals import StopSignals as S; at = S.stop_at; "
        "S.stop_at = lambda self, step: 1 / (step < 7 or "
        "'--distributed.process-id=0' in sys.argv) and at(self, step); "
    )
    trainers = start(2, *FOR_EVER, before=SLOWLY + breaks)
    trainers.until(lambda: reported(tmp_path / "run") >= 4)
    assert trainers.end(limit=HEARTBEAT_S) == [LOST, CRASHED], trainers.printed(0)
    why = "(ZeroDivisionError: division by zero)"
    assert "Traceback" in trainers.printed(1) and "Traceback" not in trainers.printed(0)
    last = trainers.last_line(1)
    assert last.startswith("error: this process crashed at step 7;") and why in last
    last = trainers.last_line(0)
    assert last.startswith("error: process 1 (host ") and ") crashed at step " in last
    assert f"--run-dir {tmp_path / 'run'} --resume (" in last and why in last


# Process 1 hangs after step 7, before the others learn that it has taken it.
HANGS = (
    "import sys, time; from train.cluster.signals import StopSignals as S; at = S.stop_at; "
    "S.stop_at = lambda self, step: (step == 7 and '--distributed.process-id=1' in "
    "sys.argv and time.sleep(1000)) or at(self, step); "
)


@pytest.mark.slow
def test_one_whose_main_thread_hangs_ends_all_and_is_named(start, tmp_path):
    """Its heartbeats go on."""
    trainers = start(2, *FOR_EVER, "--distributed.progress-timeout=10", before=HANGS)
    trainers.until(lambda: reported(tmp_path / "run") >= 4)
    assert trainers.end(limit=4 * HEARTBEAT_S) == [LOST, LOST], trainers.printed(0)
    for i in range(2):
        last = trainers.last_line(i)
        assert re.search(
            r"process 1 \(host .*\), pid \d+, after step 7, has made no ", last
        )
        assert f"--run-dir {tmp_path / 'run'} --resume" in last, trainers.printed(i)


@pytest.mark.slow
def test_process_0_is_killed_while_a_checkpoint_is_written(start, undisturbed, tmp_path):
    """The run goes on from the checkpoint before."""
    run = tmp_path / "run"
    trainers = start(2, *FOR_EVER)
    unfinished = lambda: list((run / "checkpoints").glob("[0-9]*.orbax-checkpoint-tmp*"))
    trainers.until(lambda: checkpoints(run) and unfinished())
    trainers.send(signal.SIGKILL, 0)
    assert_named(trainers, {1}, 0, run)
    (torn,) = unfinished()
    before = checkpoints(run)
    assert int(torn.name.partition(".")[0]) not in before
    trainers = start(2, "--resume", "--steps", str(END), before="")
    assert trainers.end() == [0, 0], trainers.printed(0)
    assert "cannot be read" not in trainers.printed(0)
    assert [event["step"] for event in records.read(run)["start"]] == [0, max(before)]
    assert_equal_to_the_bit(numbers(run, END), undisturbed(END))


@pytest.mark.slow
def test_one_that_stands_still_is_waited_for(start, undisturbed, tmp_path):
    """Started by Slurm, gone on with by Open MPI."""
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
    assert trainers.end(limit=60) == [0, 0], trainers.printed(0)
    assert_all_saved(trainers, run)
    rest = ["--resume", "--steps", str(END)]
    trainers = start(2, *rest, by=by_open_mpi_5, before="")
    assert trainers.end() == [0, 0], trainers.printed(0)
    assert_equal_to_the_bit(numbers(run, END), undisturbed(END))


@pytest.mark.slow
def test_one_that_is_late_for_the_first_step_is_waited_for(start, undisturbed, tmp_path):
    """As if its first step took long to compile."""
    late = (
        "import sys, time; from train.task.experiment import Experiment; "
        "whole = Experiment.batches; Experiment.batches = lambda *a: "
        "(time.sleep(40 * ('--distributed.process-id=1' in sys.argv)), whole(*a))[1]; "
    )
    trainers = start(2, "--steps", str(END), before=late)
    assert trainers.end() == [0, 0], trainers.printed(0)
    assert_equal_to_the_bit(numbers(tmp_path / "run", END), undisturbed(END))


@pytest.mark.slow
def test_a_full_disk_loses_checkpoints_and_nothing_else(start, undisturbed, tmp_path):
    """Training goes on; from the last whole checkpoint the run goes on on another disk."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, stderr=-3).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        (disk / "run").mkdir()
        run.symlink_to(disk / "run")
        more = ["--keep-checkpoints", "100", "--steps", "32"]
        trainers = start(2, *more, before="")
        assert trainers.end() == [1, 1], trainers.printed(0)
        for i, name in enumerate(["warning: ", "process 1: warning: "]):
            assert f"\n{name}the checkpoint of step " in trainers.printed(i)
            assert " was not written: " in trainers.printed(i)
        assert "test error" in trainers.last_line(
            0
        ) and "after 32 steps" in trainers.last_line(0)
        whole = checkpoints(run)
        assert whole and whole == list(range(4, 4 * len(whole) + 1, 4)) and max(whole) < 32
        run.unlink()
        shutil.copytree(disk / "run", run)
    finally:
        subprocess.run(["umount", "-l", str(disk)])
    rest = ["--resume", "--steps", str(END), "--checkpoint-every", str(END)]
    trainers = start(2, *rest, before="")
    assert trainers.end() == [0, 0], trainers.printed(0)
    assert_equal_to_the_bit(numbers(run, END), undisturbed(END))


@pytest.mark.slow
def test_one_process_that_can_not_write_loses_checkpoints_and_nothing_else(start, tmp_path):
    full = (
        "import resource, sys; '--distributed.process-id=1' in sys.argv and "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18)); "
    )
    wide = "import tiny; tiny.install(tiny.Wide); "
    trainers = start(2, "--steps", "8", before=full, tiny=wide)
    assert trainers.end() == [1, 1], trainers.printed(0)
    words = "warning: the checkpoint of step {} was not written: {}"
    for step in (4, 8):
        reason = "another process could not write its part"
        assert words.format(step, reason) in trainers.printed(0)
        assert words.format(step, "OUT_OF_RANGE") in trainers.printed(1)
    assert "after 8 steps" in trainers.last_line(0)
    assert checkpoints(tmp_path / "run") == []


# At the start


@pytest.mark.slow
def test_processes_that_were_told_other_things_do_not_begin(start, tmp_path):
    """Here another seed, and a data folder, which may well be another one."""
    by = lambda count: [
        ([*own, f"--seed={i}", f"--data.dir={i}"], set_)
        for i, (own, set_) in enumerate(by_options(count))
    ]
    trainers = start(2, by=by)
    assert trainers.end(150) == [2, 2], trainers.printed(0)
    for i in range(2):
        (line,) = [x for x in trainers.printed(i).splitlines() if x.startswith("error: ")]
        assert line == trainers.last_line(i)
        words = "`seed` must be the same in all processes, got 0 in process 0 and 1 in "
        assert line.endswith(f"{words}process 1")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_who_waits_in_vain_says_so(start, tmp_path):
    """A wrong address, processes that do not come, a port that is taken, another count."""
    few = "--distributed.start-timeout=3"
    missed = start(2, few, by=lambda count: by_options(count)[1:])
    first = start(2, few, by=lambda count: by_options(count)[:1])
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--distributed.num-processes=2", "--distributed.process-id=0"]
        options.append(f"--distributed.coordinator=127.0.0.1:{port}")
        refused = start(1, by=lambda _: [(options, {})])
        assert refused.end(150) == [2]
    why = f"nothing can listen at 127.0.0.1:{port}: Address already in use; is the port"
    assert why in refused.last_line(0)
    one_too_many = ["--distributed.num-processes=3"]
    others = start(
        2,
        by=lambda n: [(x + one_too_many * i, y) for i, (x, y) in enumerate(by_options(n))],
    )
    for trainers, answer in (
        (missed, "nothing answers there \\(Connection refused\\)"),
        (first, "something listens there"),
    ):
        assert trainers.end(150) == [LOST]
        assert re.fullmatch(
            r"error: the processes did not come together within 3 s through 127.0.0.1:"
            rf"\d+: {answer}; "
            "have all been started, each with a number of its own, and can all reach it\\? "
            "`--distributed.cluster none` "
            "trains in this process by itself",
            trainers.last_line(0),
        )
    assert others.end(150) == [2, 2]
    words = (
        "`distributed.num_processes` must be the same for all, got 3 in process 1, but 2"
    )
    assert words in others.last_line(0) and words in others.last_line(1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_second_process_of_a_number_disturbs_no_run(start, tmp_path):
    """Nor do those of another run that was given the same port."""
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


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax has mutual TLS from 0.12")
def test_with_certificates_who_has_none_is_refused(start, tmp_path):
    """Without TLS, or with a certificate from someone else; those of the run train."""
    run, other = (certificates.make(tmp_path / name) for name in ("mine", "other"))
    stranger = certificates.mix(
        tmp_path / "stranger", {"ca.pem": run, "cert.pem": other, "key.pem": other}
    )
    use = lambda folder: [f"--distributed.tls={folder}"] if folder else []
    trainers = start(2, "--steps", "4", *use(run), before="")
    assert trainers.end() == [0, 0], trainers.printed(0)
    assert checkpoints(tmp_path / "run") == [4]
    for folder in (None, stranger):
        each = by_options(2)
        first = start(1, *use(run), before="", by=lambda _, each=each: each[:1])
        second = start(1, *use(folder), before="", by=lambda _, each=each: each[1:])
        assert second.end(60) == [2]
        said = second.printed(0)
        assert said.count("\n") == 1 and said.startswith("error: started by hand, but ")
        assert "do all processes have the same --distributed.tls, or none?" in said
        assert first.printed(0) == ""
        first.__exit__()


# With the launcher


@pytest.mark.slow
def test_the_launcher_restarts_the_trainer_and_passes_ctrl_c_on(
    undisturbed, cache, tmp_path
):
    run = tmp_path / "run"

    def launch(*options):
        command = [sys.executable, "-m", "train.launch", "--processes", "2", "--grace", "1"]
        trainer = [*SMALL, "--run-dir", str(run), "--distributed.heartbeat-timeout", "8"]
        with open(tmp_path / "printed.txt", "a") as file:
            return subprocess.Popen(
                [*command, *options, "--", *trainer, *FOR_EVER],
                stdout=file,
                stderr=file,
                env=environment(cache, TINY),
            )

    def until(holds):
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            printed = (tmp_path / "printed.txt").read_text()
            assert launcher.poll() is None and time.monotonic() < deadline, printed
            time.sleep(0.01)

    launcher = launch("--max-restarts", "3")
    try:
        until(lambda: checkpoints(run))
        children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        first = list(map(int, children.read_text().split()))
        os.kill(first[1], signal.SIGKILL)
        killed_at = max(checkpoints(run))
        until(lambda: reported(run) and len(records.read(run)["start"]) == 2)
        begun = records.read(run)["start"][-1]["step"]
        assert begun >= killed_at
        until(lambda: reported(run) > begun)
        launcher.send_signal(signal.SIGINT)
        status = launcher.wait(LIMIT_S)
    finally:
        launcher.kill()
    printed = (tmp_path / "printed.txt").read_text()
    assert status == 130, printed
    assert "\nprocess 1 was ended by SIGKILL:\n" in printed
    assert "\nrestart 1 of 3\n" in printed and "restart 2" not in printed
    last = max(checkpoints(run))
    assert f"[0] stopped at step {last} after" in printed and ", saved; to go on" in printed
    assert_equal_to_the_bit(numbers(run, last), undisturbed(last))
