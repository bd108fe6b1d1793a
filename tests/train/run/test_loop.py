"""Training runs in this process: their files, and the reasons for which they stop."""

import dataclasses
import itertools
import json
import re
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from harness import close, exchanges
from jax.flatten_util import ravel_pytree
from toys import slow

import lsgd_jax as lj
from train.cluster.session import Session
from train.config import OptimizerConfig, WorkersConfig, methods
from train.metrics import log
from train.metrics.buffer import Interval
from train.metrics.tensorboard import TensorBoard
from train.run import checkpoints, loop, stopwatch
from train.run.loop import train
from train.run.open import measures_distances
from train.run.reporting import report
from train.run.saving import save
from train.task.schedules import learning_rate


pytestmark = pytest.mark.usefixtures("quick")


def center(run):
    return run.experiment.center(run.state)


# Files


@pytest.mark.slow
def test_compilation_is_no_training_time(opened, trained, monkeypatch):
    """By a clock that advances by 7 s in each step.

    The first one compiles, and 2 and 4 need exchanges that may not be compiled yet.
    """
    clock = itertools.count(0, 7)
    now = SimpleNamespace(at=next(clock))
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(monotonic=lambda: now.at))

    def timed(*after):
        now.at = next(clock)
        return after

    result = trained(opened(), timed)
    assert (result.compile_seconds, result.seconds) == (3 * 7, 9 * 7)
    events = log.read(result.folder)
    assert events["end"][-1]["compile_seconds"] == 3 * 7
    assert [event["seconds"] for event in events["test"]] == [3 * 7, 9 * 7]


def test_metrics_hold_all_intervals_elections_and_tests(finished):
    _, result = finished
    assert (result.step, result.stopped_by, result.saved) == (12, None, True)
    events, tested = log.read(result.folder), result.tested
    assert events["test"][-1]["center_error"] == tested.center["error"]
    assert events["test"][-1]["best_error"] == tested.best["error"]
    assert [event["step"] for event in events["train"]] == [4, 8, 12]
    assert [event["step"] for event in events["test"]] == [6, 12]
    by_level = lambda level: [
        event["step"] for event in events["leaders"] if event["level"] == level
    ]
    assert by_level("node") == [2, 4, 6, 8, 10, 12] and by_level("all") == [4, 8, 12]
    for event in events["leaders"]:
        groups = [{0, 1}, {2, 3}] if event["level"] == "node" else [{0, 1, 2, 3}]
        assert all(worker in group for worker, group in zip(event["leaders"], groups))
        best = [min(group, key=lambda i: event["scores"][i]) for group in groups]
        assert event["leaders"] == best
    for event in events["train"]:
        assert len(event["step_losses"]) == 4
        assert np.mean(event["step_losses"]) == pytest.approx(event["loss"])
    last = events["train"][-1]
    assert last["loss"] < events["train"][0]["loss"]
    assert last["consensus_distance"] > 0 and last["restored"] == last["waiting"] == 0
    for line in (result.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.slow
def test_distances_are_measured_on_both_sides_of_an_exchange(opened, tmp_path):
    """Also where the step before it ends the interval before."""
    run = opened(log_every=1, test_every=20, run_dir=str(tmp_path / "each"))
    each = log.read(train(run).folder)["train"]
    distance = {event["step"]: event["consensus_distance"] for event in each}
    events = log.read(train(opened(log_every=3, steps=11, test_every=20)).folder)["train"]
    expected = [[t, distance[t - 1], distance[t]] for t in (2, 6, 8, 10)]
    assert [event["exchange"] for event in events] == expected
    assert [event["consensus_distance"] for event in events] == [
        distance[t] for t in (3, 6, 9, 11)
    ]


@pytest.mark.parametrize("processes, measured", [(1, [4, 8, 12]), (2, [8, 12])])
def test_several_processes_measure_distances_as_often_as_they_test(
    processes, measured, opened, monkeypatch
):
    """Each distance takes as many bytes as an exchange."""
    session = Session(0, ["here"] * processes)

    def measures(config, _, step):
        return measures_distances(config, session, step)

    monkeypatch.setattr("train.run.open.measures_distances", measures)
    run = opened()
    run.buffer._around_exchanges = processes == 1
    events = log.read(train(run).folder)["train"]
    measured_of = {
        name: [event["step"] for event in events if event[name] is not None]
        for name in ("consensus_distance", "exchange")
    }
    around = measured if processes == 1 else []
    assert measured_of == {"consensus_distance": measured, "exchange": around}


def test_a_run_compiles_its_step_once_and_each_exchange(finished, programs):
    """The exchange of the node, and that of both levels."""
    run, _ = finished
    assert [programs.count(f"jit({name})") for name in ("defer", "arrive")] == [1, 2]
    experiment = run.experiment
    arguments = experiment.init(), experiment.data, experiment.batch(0)
    lowered = experiment.separate._defer.lower(*arguments)
    assert exchanges(lowered.compile().as_text()) == (0, [])


AVERAGED = dict(
    model="digits-bn",
    batch_statistics="average",
    # In float32: a rounding may move a code of few bits by one.
    method=methods.make("diloco", period=4, fragments=2),
)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, AVERAGED])
def test_whole_steps_have_the_same_numbers(changes, finished, opened, tmp_path):
    """The same bits, but for roundings where batch statistics are averaged, too."""
    whole = opened(static_phases=False, **changes)
    train(whole)
    run = finished[0]
    if changes:
        run = opened(run_dir=str(tmp_path / "separate"), **changes)
        train(run)
    if changes:
        found, expected = map(tiny.leaves, (run.state, whole.state))
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-6, err_msg=name)
        return
    tiny.assert_equal_to_the_bit(whole.state, run.state)
    seen, expected = (log.read(each.folder)["train"] for each in (run, whole))
    of_time = {"seconds", "steps_per_second"}
    for event, other in zip(seen, expected, strict=True):
        assert event.keys() == other.keys()
        assert all(event[name] == other[name] for name in event.keys() - of_time)


def test_only_steps_with_a_pull_communicate(finished):
    """In the whole step, collectives occur only in the branches of the two pulls."""
    run, result = finished
    experiment = run.experiment
    arguments = experiment.init(), experiment.data, experiment.batch(0)
    lowered = experiment.step.lower(*arguments, phase=None)
    always, when_due = exchanges(lowered.compile().as_text())
    numbers = sum(x[0].size for x in jax.tree.leaves(run.state.params))
    assert always == 0 and when_due == [4 * (numbers + 1) + 8] * 2
    sent = log.read(result.folder)["train"][-1]["bytes_sent"]
    assert sent == (12 // 2 + 12 // 4) * (4 * (numbers + 1) + 8)


@pytest.mark.slow
def test_a_program_for_each_phase_computes_the_same(finished, opened):
    expected, _ = finished
    run = opened(static_phases=True)
    train(run)
    close(run.state.params, expected.state.params)
    arguments = run.experiment.init(), run.experiment.data, run.experiment.batch(0)
    for step, sent in ((1, False), (2, True)):
        lowered = run.experiment.step.lower(*arguments, phase=run.experiment.phase(step))
        always, when_due = exchanges(lowered.compile().as_text())
        assert (always > 0, when_due) == (sent, [])


def test_the_step_compiles_once_and_its_buffers_are_donated(finished, traces):
    run, _ = finished
    assert traces.count(run.experiment.task) == 1
    experiment, state = run.experiment, run.experiment.init()
    experiment.take(state, experiment.batch(0), 1)
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.size > 100]
    assert len(arrays) >= 2 and all(leaf.is_deleted() for leaf in arrays)


# Messages beside the steps

LATE = dict(method=methods.make("diloco", period=4, delay=2), batch_size=8)
KINDS = {
    "diloco": LATE,
    "added": dict(method=methods.make("diloco", period=4, delay=4, late="add")),
    "lsgd": dict(method=methods.make("lsgd", local_period=2, global_period=4, delay=1)),
    "int8": dict(method=methods.make("diloco", period=4, delay=3, wire="int8")),
}


@pytest.mark.parametrize("kind", [slow("diloco"), "added", slow("lsgd"), slow("int8")])
def test_messages_beside_the_steps_change_no_number(kind, opened, tmp_path, monkeypatch):
    """Nor does a run that is resumed while its message is in flight."""
    changes = KINDS[kind] | dict(checkpoint_every=3, log_every=3)
    inside = opened(run_dir=str(tmp_path / "inside"), beside=False, **changes)
    expected = train(inside)
    monkeypatch.setattr(lj.Workers, "travels_beside", lambda self, method: True)
    options = changes | dict(run_dir=str(tmp_path / "beside"))
    first = opened(**options)
    train(first)
    again = opened(**options | dict(steps=7, run_dir=str(tmp_path / "again")))
    train(again)
    resumed = opened(**options | dict(run_dir=str(tmp_path / "again"), resume=True))
    result = train(resumed)
    tiny.assert_equal_to_the_bit(resumed.state, first.state)
    leaves = tiny.leaves(inside.state)
    for name, x in tiny.leaves(resumed.state).items():
        np.testing.assert_allclose(leaves[name], x, rtol=1e-5, atol=1e-6, err_msg=name)
    found = result.tested.center["loss"]
    assert found == pytest.approx(expected.tested.center["loss"], rel=1e-5)
    for beside, whole in zip(*(log.read(x.folder)["train"] for x in (first, inside))):
        assert beside.pop("exchange_wait_s") >= 0
        assert beside["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert beside["pulls"] == whole["pulls"]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(method=methods.make("diloco", period=4)), "without a `delay`"),
        (dict(method=methods.make("allreduce")), "exchanges no parameters"),
        (LATE | dict(static_phases=True), "left out with beside"),
        (
            LATE | dict(model="digits-bn", batch_statistics="average"),
            "batch_statistics=average",
        ),
    ],
)
def test_settings_without_messages_beside_are_refused(
    changes, message, opened, monkeypatch
):
    with pytest.raises(ValueError, match=message):
        opened(beside=True, **changes)
    # By default they keep messages in the step.
    monkeypatch.setattr(lj.Workers, "travels_beside", lambda self, method: True)
    assert opened(**changes).experiment.waited is None


# Steps without a gradient: 3, 6, 7, 9 and 10, so that the interval of 9 and 10 has no loss.

SKIPPED = [3, 6, 7, 9, 10]
PALSGD = dict(
    method=methods.make("palsgd", period=5, probability=0.6, pull=0.2, seed=2),
    optimizer=OptimizerConfig(
        learning_rate=0.1, momentum=0.9, warmup_steps=4, schedule="drops", drop_at=(7, 9)
    ),
    log_every=2,
)


@pytest.fixture
def gradients_of(monkeypatch):
    """Collects the steps at which a run calls the step with a gradient."""

    def gradients_of(run):
        take = run.experiment.take
        seen = []

        def counted(state, batch, step):
            seen.append(step)
            return take(state, batch, step)

        monkeypatch.setattr(run.experiment, "take", counted)
        return seen

    return gradients_of


@pytest.mark.parametrize("static_phases", [None, slow(True)])
def test_a_skipped_step_computes_no_gradient(
    opened, gradients_of, static_phases, capsys, tmp_path
):
    run = opened(static_phases=static_phases, **PALSGD)
    computed = gradients_of(run)
    train(run)
    assert computed == [t for t in range(1, 13) if t not in SKIPPED]
    expected, losses = palsgd_by_hand(run)
    close(raveled(run.state.params), expected)
    events = log.read(run.folder)["train"]
    found = sum([event["step_losses"] for event in events], [])
    assert [t for t, loss in enumerate(found, 1) if loss is None] == SKIPPED
    close(np.array([loss for loss in found if loss is not None]), np.array(losses))
    assert [event["step"] for event in events if event["loss"] is None] == [10]
    assert "warning" not in capsys.readouterr().out


def palsgd_by_hand(run):
    """The equations, with a batch for each gradient: (parameters [W, n], mean losses)."""
    experiment = run.experiment
    options = run.config.method
    rate = learning_rate(run.config.optimizer, run.config.steps)
    state = experiment.workers.fetch(experiment.init())
    data = jax.tree.map(jnp.asarray, experiment.workers.fetch(experiment.data))
    _, unravel = ravel_pytree(jax.tree.map(lambda x: x[0], state.params))

    def loss_of(x, rows, key):
        return experiment.forward.loss(unravel(x), {}, data, rows, key)[0]

    gradient = jax.jit(jax.vmap(jax.value_and_grad(loss_of)))
    keys_at = jax.vmap(jax.random.fold_in, (0, None))
    x = raveled(state.params)
    velocity = np.zeros_like(x)
    anchor = x.mean(0)
    outer = np.zeros_like(anchor)
    losses = []
    for t in range(1, run.config.steps + 1):
        now = float(rate(t - 1))
        if t in SKIPPED:
            x = x - now * options.pull / options.probability * (x - anchor)
        else:
            batch = experiment.workers.fetch(experiment.batch(len(losses)))
            loss, grads = gradient(x, batch, keys_at(state.key, t - 1))
            losses.append(float(loss.mean()))
            velocity = 0.9 * velocity + np.array(grads)
            x = x - now / (1 - options.probability) * velocity
        if t % options.period == 0:
            delta = anchor - x.mean(0)
            outer = 0.9 * outer + delta
            anchor = anchor - 0.25 * (0.9 * outer + delta)
            x = np.broadcast_to(anchor, x.shape)
    return x, losses


def raveled(params):
    """Parameters of all workers as an array [W, n]."""
    return np.array(jax.vmap(lambda tree: ravel_pytree(tree)[0])(params))


def test_a_run_stopped_at_a_skipped_step_resumes_bit_identically(
    opened, tmp_path, monkeypatch
):
    undisturbed = opened(**PALSGD, run_dir=str(tmp_path / "undisturbed"))
    assert train(undisturbed).is_good
    run = opened(**PALSGD)
    skip = run.experiment.skip

    def stopped(*given, **named):
        if run.step + 1 == 7:
            signal.raise_signal(signal.SIGTERM)
        return skip(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(run.experiment, "skip", stopped)
        assert train(run).stopped_by == signal.SIGTERM
    again = opened(**PALSGD, resume=True)
    assert again.step == 7 and train(again).is_good
    tiny.assert_equal_to_the_bit(again.state, undisturbed.state)
    events = [log.read(each.folder)["train"] for each in (again, undisturbed)]
    losses = [[(e["step"], e["step_losses"]) for e in found] for found in events]
    assert losses[0] == losses[1]
    average = undisturbed.buffer.recent.average
    np.testing.assert_array_equal(again.buffer.recent.average, average)


# Stopping


def signaled(run, step, number=signal.SIGINT):
    """A change of a run that sends a signal after a step."""

    def change(*after):
        if run.step == step:
            signal.raise_signal(number)
        return after

    return change


@pytest.mark.parametrize("number", [slow(signal.SIGINT), signal.SIGTERM])
def test_a_run_stopped_by_a_signal_resumes_bit_identically(
    number, finished, opened, trained, traces, capsys
):
    run = opened()
    result = trained(run, signaled(run, 4, number))
    assert (result.step, result.stopped_by, result.saved) == (5, number, True)
    printed = capsys.readouterr().out
    assert printed.startswith("Workers(") and "stopped at step 5 after" in printed
    assert f"), saved\nto resume: python -m train digits --run-dir {run.folder}" in printed
    again = opened(resume=True)
    assert again.step == 5
    result = train(again)
    printed = capsys.readouterr().out
    assert "\nresumed at step 5\n" in printed
    _, _, table = printed.partition("resumed at step 5\n")
    rows = dict(re.findall(r"^  (\S.*?)  +(.*)$", table, re.M))
    assert rows["last checkpoint"] == "step 12"
    assert rows["center"] == f"test error {result.tested.center['error']:.2f} %"
    assert rows.keys() >= {"best checkpoint", "compile time", "sent per worker"}
    assert result.stopped_by is None and result.tested == finished[1].tested
    tiny.assert_equal_to_the_bit(finished[0].state, again.state)
    assert traces.count(again.experiment.task) == 1
    seconds = [event["seconds"] for event in log.read(result.folder)["train"]]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("step, number", [slow(6, signal.SIGTERM), (12, signal.SIGINT)])
def test_a_test_is_left_at_once_and_made_up_for(
    step, number, finished, opened, monkeypatch, capsys
):
    """The checkpoint of the same step is written before the test, and has its result."""
    run = opened()
    test, saved = tiny.Shared.test, []

    def signaled(self, *given):
        if run.step == step:
            saved.append(run.checkpoints.save(step, None, {}))  # it has begun
            signal.raise_signal(number)
        return test(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(tiny.Shared, "test", signaled)
        result = train(run)
    assert (result.step, result.stopped_by, result.tested) == (step, number, None)
    assert result.saved and saved == [True]
    assert f"stopped at step {step} after" in capsys.readouterr().out
    assert step not in [event["step"] for event in log.read(run.folder).get("test", [])]
    again = opened(resume=True)
    assert again.step == step
    result = train(again)
    assert (result.tested, result.best) == (finished[1].tested, finished[1].best)
    tests = [log.read(x.folder)["test"] for x in (again, finished[0])]
    resumed, undisturbed = ([(e["step"], e["center_loss"]) for e in x] for x in tests)
    assert resumed == undisturbed
    tiny.assert_equal_to_the_bit(finished[0].state, again.state)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_leaves_no_time_for_batch_statistics(number, opened, monkeypatch):
    def reestimated(self, params, stats, check):
        check()
        return stats

    monkeypatch.setattr(tiny.Shared, "reestimated", reestimated)
    run = opened(model="digits-bn")
    run.stop_signals.received = number
    assert save(run) and run.checkpoints.close()
    has_center = (run.folder / "checkpoints" / "0" / checkpoints.MODEL).exists()
    assert has_center == (number == signal.SIGINT)


def test_ctrl_c_during_compilation_is_answered(opened, trained, capsys):
    run = opened()
    assert trained(run, signaled(run, 0)).step == 1
    said = "\nCtrl-C: the run saves and ends when step 1 has been compiled\n"
    assert said in capsys.readouterr().out


def test_a_second_ctrl_c_interrupts_at_once(opened, trained):
    def interrupted(*after):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    run = opened()
    with pytest.raises(KeyboardInterrupt):
        trained(run, interrupted)
    run.checkpoints.close()


@pytest.mark.slow
def test_ctrl_c_while_figures_are_drawn_loses_no_result(opened, monkeypatch, capsys):
    draw = lambda folder: signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(loop, "draw", draw)
    run = opened()
    with jax.debug_nans(True):  # which must find none
        assert train(run).is_good
    assert f"everything is in {run.folder}" in capsys.readouterr().out


def test_a_full_disk_loses_only_the_new_checkpoints(opened, monkeypatch, capsys):
    room = iter([10**9, 1000])
    free = lambda folder: SimpleNamespace(free=next(room))
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", free)
    run = opened()
    result = train(run)
    assert result.step == 12 and not result.saved
    assert 0 <= result.tested.center["error"] <= 100
    printed = capsys.readouterr().out
    needed = sum(x.nbytes for x in jax.tree.leaves((run.state, center(run))))
    why = f"it takes {needed:,} bytes, and 1,000 are free"
    assert f"warning: the checkpoint of step 12 was not written: {why}\n" in printed
    missing = (
        f"; the last checkpoint is NOT in {result.folder}, the latest one is of step 6"
    )
    assert missing in printed and not result.is_good
    assert len(log.read(result.folder)["test"]) == 2
    assert opened(resume=True).step == 6


@pytest.mark.parametrize("full", ["from the start", "at the end"])
def test_missing_metrics_are_reported_in_the_last_lines(full, opened, capsys, monkeypatch):
    def no_space(files, close=TensorBoard.close):
        close(files)
        raise OSError(28, "No space left on device")

    run = opened()
    if full == "at the end":
        monkeypatch.setattr(TensorBoard, "close", no_space)
    else:
        (run.folder / "metrics.jsonl").mkdir()  # in the way
    result = train(run)
    assert result.saved and result.is_good and not result.has_metrics
    printed = capsys.readouterr().out
    assert printed.count("warning: metrics cannot be written any more") == 1
    assert printed.endswith(f"; NOT all metrics are in {result.folder}\n")


def test_a_killed_run_resumes_as_if_it_had_not_been_killed(finished, opened, trained):
    """Including metrics, leaders and best workers. Steps 5 and 6 were not written yet."""
    run = opened()

    def killed(*after):
        if run.step == 7:
            run.checkpoints.wait()
            raise InterruptedError("killed")
        return after

    with pytest.raises(InterruptedError):
        trained(run, killed)
    again = opened(resume=True)
    assert again.step == 6 and train(again).is_good
    assert again.stopwatch.compile_seconds > run.stopwatch.compile_seconds > 0
    of_time = {"seconds", "steps_per_second", "compile_seconds"}
    undisturbed, resumed = (
        {
            kind: [{k: v for k, v in e.items() if k not in of_time} for e in found]
            for kind, found in log.read(folder).items()
            if kind not in ("start", "saved")  # when a checkpoint is seen depends on time
        }
        for folder in (finished[1].folder, again.folder)
    )
    assert undisturbed == resumed and resumed.keys() >= {"train", "leaders", "test"}
    average = finished[0].buffer.recent.average
    np.testing.assert_array_equal(average, again.buffer.recent.average)


# The best checkpoint


def found_by_tests(monkeypatch, errors):
    """Makes tests of the center and of the best worker find these errors in %."""
    found = iter(errors)
    for name in ("test", "test_worker"):
        result = lambda *_: {"error": next(found), "loss": 1.0}
        monkeypatch.setattr(tiny.Shared, name, result)


@pytest.mark.slow
def test_a_test_that_is_the_best_so_far_is_saved(opened, monkeypatch, capsys):
    found_by_tests(monkeypatch, [50.0, 50.0, 30.0, 30.0, 40.0, 40.0, 45.0, 45.0])
    computed, center = [], tiny.Shared.center

    def noted(self, state, *check):
        computed.append(int(state.step.value))
        return center(self, state, *check)

    monkeypatch.setattr(tiny.Shared, "center", noted)
    run = opened(test_every=3, checkpoint_every=6, keep_checkpoints=1)
    result = train(run)
    assert computed == [3, 6, 9, 12]  # once for a test and a checkpoint
    assert checkpoints.steps_in(run.folder / "checkpoints") == [6, 12]
    assert result.best == (6, {"error": 30.0, "loss": 1.0}) and result.is_good
    printed = capsys.readouterr().out
    said = "\nbest checkpoint: step 6, 30.00 %; last checkpoint: step 12; everything"
    assert said in printed


@pytest.mark.slow
def test_the_best_checkpoint_survives_a_stop_and_a_resumption(
    opened, trained, monkeypatch, capsys
):
    found_by_tests(monkeypatch, [5.0, 5.0, 9.0, 9.0, 7.0, 7.0, 8.0, 8.0, 6.0, 6.0])
    run = opened(test_every=3, checkpoint_every=20, keep_checkpoints=1)
    trained(run, signaled(run, 7))
    assert checkpoints.steps_in(run.folder / "checkpoints") == [3, 8]
    said = "saved\nbest checkpoint: step 3, 5.00 %; last checkpoint: step 8; to res"
    assert said in capsys.readouterr().out
    options = dict(test_every=3, checkpoint_every=20, keep_checkpoints=1, resume=True)
    assert train(opened(**options)).best.step == 3
    assert checkpoints.steps_in(run.folder / "checkpoints") == [3, 12]


@pytest.mark.parametrize(
    "last, worker, good",
    [(89.0, 88.0, False), slow(15.0, 15.0, True), (89.0, 5.0, True)],
)
def test_a_run_that_ends_far_above_its_best_has_diverged(
    last, worker, good, opened, monkeypatch, capsys
):
    """Unless the best worker is good: some methods have no center to use."""
    found_by_tests(monkeypatch, [2.8, 2.8, last, worker])
    result = train(opened())
    assert result.is_good == good
    printed = capsys.readouterr().out
    diverged = "; training has diverged: the last test is far above the best one"
    assert (diverged in printed) != good
    assert log.read(result.folder)["end"][-1].get("far_above_best", False) != good
    assert "\nbest checkpoint: step 6, 2.80 %; last checkpoint: step 12" in printed


def test_the_best_worker_is_known_before_the_first_report(opened, trained):
    third_is_best = lambda state, loss: (state, loss.at[2].set(0.01))
    result = trained(opened(steps=2), third_is_best)
    assert log.read(result.folder)["test"][-1]["best_worker"] == 2


# Nonfinite losses and parameters


def test_a_run_without_finite_losses_stops_with_a_checkpoint(opened, trained, capsys):
    run = opened(steps=400, stop_after_nonfinite=5)
    result = trained(run, lambda state, loss: (state, loss * jnp.nan))
    assert result.stopped_by == "nonfinite" and result.saved
    assert result.step == 5 and result.finite_checkpoint is None
    assert (run.folder / "checkpoints" / str(result.step)).is_dir()
    printed = capsys.readouterr().out
    assert "warning: no worker has had a finite loss for" in printed
    assert "no worker had a finite loss for 5 steps" in printed and "--resume" in printed
    assert "no checkpoint has finite losses" in printed
    again = train(opened(steps=8, stop_after_nonfinite=5, resume=True))
    assert (again.step, again.stopped_by, again.is_good) == (8, None, True)


def test_the_last_lines_say_that_a_run_has_diverged(opened, trained, capsys):
    """It ends before the limit of nonfinite steps, so the last test takes place."""
    run = opened()
    diverged = lambda state, loss: (state, loss * (jnp.nan if run.step >= 8 else 1))
    result = trained(run, diverged)
    assert result.stopped_by is None and result.saved and not result.is_good
    printed = capsys.readouterr().out
    assert "training has diverged: a loss is not finite\nthe latest checkpoint" in printed
    assert "with finite losses is of step 6; best checkpoint: step 6, " in printed
    assert "last checkpoint: step 12; everything is in" in printed


def test_a_diverged_worker_is_reported_and_restored(opened, capsys):
    run = opened()
    poisoned = jax.tree.map(lambda x: x.at[0].set(jnp.nan), run.state.params)
    placed = run.experiment.workers.put(poisoned)
    run.state = run.state._replace(params=placed)
    result = train(run)
    assert result.stopped_by is None and np.isfinite(result.tested.center["error"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run.state.params))
    printed = capsys.readouterr().out
    assert "the loss of worker 0 was not finite" in printed
    said = "worker 0 was not finite and was restored at an exchange (seen up to step 4)"
    assert printed.count("was restored at an exchange") == printed.count(said) == 1
    events = log.read(result.folder)
    assert events["train"][-1]["restored"] >= 1 and events["train"][-1]["waiting"] == 0
    assert all(0 not in e["leaders"] for e in events["leaders"] if e["step"] <= 4)
    momentum = [x for name, x in tiny.leaves(run.state).items() if "trace" in name]
    assert momentum and all(np.isfinite(x).all() for x in momentum)


def test_workers_whose_exchanges_are_dropped_in_a_row_are_named(opened, capsys):
    """Finite workers whose mean is not finite: nothing that they exchange is a target."""
    run = opened()
    (level, *_) = lj.diagnostics(run.state.opt_state)
    rows = {(0, 0, 0, 0): "", (0, 1, 0, 0): "", (0, 3, 0, 2): "1, 3"}
    for in_a_row, named in rows.items():
        pull = dataclasses.replace(level, dropped_in_a_row=np.array(in_a_row))
        losses = np.ones((1, 4), np.float32)
        report(run, Interval(8, losses, 0.0, done=8, diagnostics=(pull,)))
        said = (
            f"warning: worker {named} trains alone: the last 3 exchanges of pull 1 (every "
            "2 steps, over local) were dropped, for about 6 steps up to step 8; see docs/"
        )
        assert (said in capsys.readouterr().out) == bool(named)


@pytest.mark.parametrize("method", ["diloco", "async-diloco", "independent", "krum"])
def test_a_method_that_will_exchange_nothing_is_a_warning(method):
    config = dataclasses.replace(tiny.SMALL, method=methods.make(method), steps=63)
    warned = loop.without_exchanges(config)
    assert warned == (
        f"{method} first exchanges at step 64 and the run has 63: its workers train "
        "independently"
    ) * ("diloco" in method)
    assert not loop.without_exchanges(dataclasses.replace(config, steps=64))
    alone = dataclasses.replace(config, workers=WorkersConfig(1, 1))
    assert not loop.without_exchanges(alone)


@pytest.mark.parametrize(
    "method, options, limit",
    [
        # Five leaves, of which four are large. Two fragments have two each.
        ("diloco", {"period": 4, "delay": 1}, 5 + 3),
        ("diloco", {"period": 4, "delay": 1, "fragments": 2}, 3 + 3),
        ("diloco", {"period": 4, "delay": 1, "wire": "int8"}, 2 * 5 + 3),
        ("diloco", {"period": 4}, None),
        ("independent", {}, None),
        ("async-diloco", {}, None),
    ],
)
def test_the_flag_with_which_delayed_messages_travel_together_on_gpus(
    opened, method, options, limit
):
    run = opened(method=methods.make("diloco"))
    made = methods.make(method, **options)
    own = None if made.is_asynchronous else made.exchanges(0.1)
    run = SimpleNamespace(
        config=dataclasses.replace(run.config, method=made),
        experiment=SimpleNamespace(method=own, workers=run.experiment.workers, waited=None),
        state=SimpleNamespace(params=[jnp.zeros([2, n]) for n in [loop.LARGE] * 4 + [9]]),
    )
    flag = "xla_gpu_experimental_parallel_collective_overlap_limit"
    line = loop.flag_for_delay(run, "gpu", {})
    assert (f" XLA_FLAGS=--{flag}={limit}, see" in line) is (limit is not None)
    assert bool(line) is (limit is not None) and "\n" not in line
    assert not loop.flag_for_delay(run, "cpu", {})
    assert not loop.flag_for_delay(run, "gpu", {"XLA_FLAGS": f"--a --{flag}=4"})


def test_a_run_on_gpus_says_the_flag_of_its_delay(opened, monkeypatch, capsys):
    monkeypatch.setattr(loop.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(loop, "LARGE", 1)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    loop.announce(opened(method=methods.make("diloco", period=4, delay=1)))
    assert "XLA_FLAGS=--xla_gpu_experimental_parallel" in capsys.readouterr().out
