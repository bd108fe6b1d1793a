"""--distributed.survive: nodes are lost for good, and the others go on."""

import signal

import pytest
from trainers import (
    FOR_EVER,
    HEARTBEAT_S,
    assert_equal_to_the_bit,
    by_options,
    checkpoints,
    numbers,
    reported,
    train_here,
)

from train.cluster.exit_status import LOST
from train.metrics import log as records


pytestmark = pytest.mark.slow


def begun(run, number):
    """The step at which the training of so many workers began, once it has."""
    starts = records.read(run).get("start", []) if run.exists() else []
    return starts[number - 1]["step"] if len(starts) >= number else None


def test_one_node_is_lost_one_leaves_and_the_last_one_ends_the_run(start, tmp_path):
    """The same numbers as of a run that was resumed on purpose with the nodes left."""
    run, again = tmp_path / "run", tmp_path / "again"
    nodes = lambda n: ["--workers.nodes", str(n), "--keep-checkpoints", "100"]
    trainers = start(3, *nodes(3), "--steps", "60", "--distributed.survive")
    trainers.until(lambda: reported(run) >= 6)
    trainers.send(signal.SIGKILL, 2)
    trainers.until(lambda: begun(run, 2) and reported(run) >= begun(run, 2) + 4, gone=[2])
    trainers.send(signal.SIGTERM, 1)
    assert trainers.end() == [0, 0, -signal.SIGKILL], trainers.printed(0)

    assert [x["workers"] for x in records.read(run)["start"]] == [[3, 2], [2, 2], [1, 2]]
    assert [x["processes"] for x in records.read(run)["start"]] == [3, 2, 1]
    printed = trainers.printed(0)
    assert (
        "\nwarning: process 2 (host " in printed and ") was lost; the others go" in printed
    )
    assert (
        "\nwarning: process 1 (host " in printed and ") has left; the others go" in printed
    )
    assert "\n2 x 2 workers go on from 3 x 2: " in printed
    assert "\n1 x 2 workers go on from 2 x 2: " in printed
    assert "after 60 steps" in trainers.last_line(0) and "to go on" not in printed

    lost, left = begun(run, 2), begun(run, 3)
    assert 4 <= lost < left < 60 and lost in checkpoints(run) and left in checkpoints(run)
    train_here(*nodes(3), "--steps", str(lost), "--run-dir", str(again))
    for number, steps in ((2, left), (1, 60)):
        more = ["--resume", "--steps", str(steps), "--run-dir", str(again)]
        train_here(*nodes(number), *more)
    assert_equal_to_the_bit(numbers(run, 60), numbers(again, 60))


# Process 2 finds no program in the cache, and one takes it longer than a heartbeat may.
COLD = (
    "import sys, time, jax; from jax._src import compiler; "
    "whole_compile = compiler.backend_compile_and_load; slow = []; "
    "cold = '--distributed.process-id=2' in sys.argv; "
    "cold and jax.config.update('jax_enable_compilation_cache', False); "
    "compiler.backend_compile_and_load = lambda *a, **k: ("
    f"cold and not slow and '_step' in str(a[1].operation.attributes['sym_name']) and "
    "(slow.append(print('compiles for long', flush=True)), "
    f"time.sleep({HEARTBEAT_S + 5})), whole_compile(*a, **k))[1]; "
)


def test_one_that_must_compile_what_the_others_have_from_a_cache_is_waited_for(
    start, tmp_path
):
    run = tmp_path / "run"
    options = ["--workers.nodes", "3", "--distributed.survive"]
    trainers = start(3, *options, "--steps", "4", before="")
    assert trainers.end() == [0, 0, 0], trainers.printed(0)
    more = [*options, "--resume", "--steps", "8", "--test-every", "2"]
    trainers = start(3, *more, before=COLD)
    assert trainers.end() == [0, 0, 0], trainers.printed(0)
    assert "compiles for long" in trainers.printed(2)
    assert "lost" not in trainers.printed(0) and "Gloo" not in trainers.printed(0)
    assert [x["processes"] for x in records.read(run)["start"]] == [3, 3]
    assert checkpoints(run)[-1] == 8


def test_a_node_goes_as_a_whole_and_none_survives_process_0(start, tmp_path):
    """Two nodes of two processes: who has lost its neighbor ends, and says why."""
    run = tmp_path / "run"
    trainers = start(4, *FOR_EVER, "--distributed.survive")
    trainers.until(lambda: reported(run) >= 6)
    trainers.send(signal.SIGKILL, 3)
    trainers.until(lambda: begun(run, 2) and reported(run) > begun(run, 2), gone=[2, 3])
    trainers.send(signal.SIGKILL, 0)
    killed = -signal.SIGKILL
    statuses = trainers.end(limit=3 * HEARTBEAT_S)
    assert statuses == [killed, LOST, LOST, killed], trainers.printed(1)
    last = trainers.last_line(2)
    assert last.startswith("error: process 3 (host ") and ") was lost at step " in last
    assert last.endswith("; the nodes that are whole go on without this process")
    last = trainers.last_line(1)
    assert last.startswith("error: process 0 (host ") and ") was lost at step " in last
    assert f"--run-dir {run} --resume" in last
    assert [x["workers"] for x in records.read(run)["start"]] == [[2, 2], [1, 2]]


# Process DIES is killed by itself at its eighth step.
AT_STEP_8 = (
    "import os; from train.task.experiment import Experiment; whole = Experiment.batches; "
    "Experiment.batches = lambda self, steps: "
    "(os.kill(os.getpid(), 9) if i == 7 and 'DIES' in os.environ else x "
    "for i, x in zip(steps, whole(self, steps))); "
)


def test_a_loss_while_a_network_of_many_leaves_is_measured_aborts_no_survivor(
    start, tmp_path
):
    """Reports and tests sum up leaves that are no one buffer, at the moment of the loss."""

    def by_options_one_dies(count):
        each = by_options(count)
        return [
            (own, {"DIES": "1"} if i == 1 else set_) for i, (own, set_) in enumerate(each)
        ]

    often = ["--log-every", "4", "--test-every", "8", "--steps", "16"]
    trainers = start(
        3,
        *("--workers.nodes", "3", "--distributed.survive", *often),
        by=by_options_one_dies,
        before=AT_STEP_8,
        tiny="",
        JAX_NUM_CPU_DEVICES="2",
    )
    assert trainers.end() == [0, -signal.SIGKILL, 0], trainers.printed(2)
    assert [x["workers"] for x in records.read(tmp_path / "run")["start"]] == [
        [3, 2],
        [2, 2],
    ]
    assert "after 16 steps" in trainers.last_line(0)
