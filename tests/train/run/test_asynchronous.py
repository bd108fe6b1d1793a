"""Runs of asynchronous workers: the same run folder, and the same ways to end."""

import dataclasses
import signal
import time
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import simulated_engine
import tiny

import train as trainer
from lsgd_jax.asynchronous import Status, WorkerReport
from train.__main__ import main
from train.config import WorkersConfig, methods
from train.metrics import log
from train.run import asynchronous, cli, loop
from train.run.loop import train


pytestmark = pytest.mark.usefixtures("quick")

LSGD = methods.make("async-lsgd", local_period=2, global_period=4, loss_window=3)
ASYNCHRONOUS = {"method": LSGD, "test_every": 4}
DRAW = loop.draw  # which the fixture `quick` replaces
SLOW = {"step_seconds": [1.0, 1.0, 3.0, 1.0]}
EVEN = {"step_seconds": 1.0}


@pytest.fixture
def opened(opened):
    """Opens a run of asynchronous workers with some settings changed."""
    return lambda **changes: opened(**ASYNCHRONOUS | changes)


@pytest.fixture
def ran(opened, monkeypatch):
    """Takes the steps of a run under simulated time: (run, result)."""

    def ran(engine, **changes):
        simulated_engine.install(monkeypatch.setattr, **engine)
        run = opened(**changes)
        return run, train(run)

    return ran


@pytest.mark.slow
def test_a_run_writes_the_usual_files_and_the_progress_of_each_worker(ran, monkeypatch):
    monkeypatch.setattr(loop, "draw", DRAW)
    run, result = ran(SLOW)
    assert (result.step, result.stopped_by, result.saved) == (12, None, True)
    names = {path.name for path in result.folder.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "tensorboard", "training.png"}
    assert names >= {"leaders.png", "consensus.png", "pace.png"}
    assert {path.name for path in (result.folder / "checkpoints").iterdir()} >= {"6", "12"}
    events = log.read(result.folder)
    assert [event["step"] for event in events["test"]] == [4, 8, 12]
    assert [event["step"] for event in events["train"]] == [4, 8, 12]
    assert events["train"][-1]["loss"] < events["train"][0]["loss"]
    assert all(event["consensus_distance"] > 0 for event in events["train"])
    last = events["pace"][-1]
    assert sum(last["steps"]) == 48 and last["steps"][2] < min(last["steps"][:2])
    assert last["present"] == [0, 1, 2, 3]
    scores = last["scores"]
    assert last["leader"] == min(range(4), key=scores.__getitem__)
    assert {event["level"] for event in events["leaders"]} == {"node", "all"}
    assert events["test"][-1]["center_error"] == result.tested.center["error"]
    loaded = trainer.load(result.folder, "last").variables["params"]
    expected = jax.tree.map(lambda x: np.mean(x, axis=0), run.state.params)
    jax.tree.map(np.testing.assert_allclose, loaded, expected)


@pytest.mark.slow
def test_a_run_stopped_by_a_signal_resumes(ran, capsys):
    def signaled(status, remote):
        if sum(report.steps for report in status.reports.values()) == 28:
            signal.raise_signal(signal.SIGTERM)

    run, result = ran(SLOW | {"befalls": signaled})
    assert (result.stopped_by, result.saved) == (signal.SIGTERM, True) and result.step < 12
    counts = np.asarray(run.state.engine.count)
    assert "to resume: python -m train digits --run-dir" in capsys.readouterr().out

    again, result = ran(SLOW, resume=True)
    assert (result.step, result.stopped_by) == (12, None)
    events = log.read(result.folder)
    steps = events["pace"][-1]["steps"]
    assert sum(steps) == 48 and (np.array(steps) > counts).sum() >= 3
    assert events["test"][-1]["center_error"] < 50


@pytest.mark.slow
def test_the_start_of_the_processes_is_no_time_of_training(ran):
    def signaled(status, remote):
        if not remote.stopped:
            time.sleep(1)
            signal.raise_signal(signal.SIGTERM)

    run, result = ran(SLOW | {"befalls": signaled, "look": 1})
    assert result.stopped_by == signal.SIGTERM and run.stopwatch.compile_seconds > 1
    assert result.seconds < 1


@pytest.mark.slow
def test_workers_resume_from_exactly_what_was_saved(ran, tmp_path):
    """At equal pace, a resumed run is bit-identical to an uninterrupted one."""
    method = methods.make("overlapped-lsgd", 0.1, 0.1, 2, 4, 3, delay=0)
    settings = dict(method=method, test_every=12, checkpoint_every=12)
    ran(EVEN, **settings, steps=6)
    resumed, _ = ran(EVEN, **settings, resume=True)
    whole, _ = ran(EVEN, **settings, run_dir=str(tmp_path / "whole"))
    for a, b in zip(*(jax.tree.leaves(run.state.params) for run in (resumed, whole))):
        np.testing.assert_array_equal(a, b)


def test_a_failed_worker_is_named_and_the_others_continue(ran, capsys):
    def lost(status, remote):
        if status.reports[0].steps >= 4 and 1 in status.present:
            remote.lose(1)

    run, result = ran(SLOW | {"befalls": lost})
    assert (result.step, result.saved) == (12, True)
    assert "warning: worker 1 is down at its step" in capsys.readouterr().out
    last = log.read(result.folder)["pace"][-1]
    assert last["present"] == [0, 2, 3]
    assert sum(last["steps"]) in (47, 48)  # it may have failed within a step


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, x in methods.METHODS.items() if x.is_asynchronous]
)
def test_every_method_trains_and_resumes_with_other_workers(name, ran):
    small = {"period": 4, "local_period": 2, "global_period": 4, "delay": 1}
    small |= {"local_steps": 4, "sync_period": 4}
    fields = methods.find(name).__dataclass_fields__
    method = methods.make(name, **{k: x for k, x in small.items() if k in fields})
    run, result = ran(EVEN if name.startswith("overlapped") else SLOW, method=method)
    assert (result.step, result.saved, result.stopped_by) == (12, True, None)
    assert result.tested.center["error"] < 70
    like = run.experiment.init()
    assert jax.tree.structure(like) == jax.tree.structure(run.state)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert shapes(like) == shapes(run.state)

    changes = dict(method=method, workers=WorkersConfig(1, 2), steps=24, resume=True)
    run, result = ran(EVEN, **changes)
    assert (result.step, result.saved) == (24, True)
    assert result.tested.center["error"] < 20
    (event,) = log.read(result.folder)["resized"]
    assert event["new"] == [1, 2]


@pytest.mark.slow
def test_nonfinite_losses_stop_the_run(ran, capsys):
    rate = dataclasses.replace(tiny.SMALL.optimizer, learning_rate=1e38)
    _, result = ran(SLOW, optimizer=rate, stop_after_nonfinite=3)
    assert result.stopped_by == "nonfinite" and result.step < 12 and result.saved
    assert "no worker had a finite loss for 3 steps" in capsys.readouterr().out


def test_a_failure_of_the_engine_is_reported_in_one_line(tmp_path, monkeypatch, capsys):
    fails = Mock(side_effect=RuntimeError("worker 1 was lost 4 times in a row"))
    simulated_engine.install(monkeypatch.setattr)
    monkeypatch.setattr(asynchronous.engine(), "run", fails)
    changes = ASYNCHRONOUS | {"run_dir": str(tmp_path / "run")}
    config = dataclasses.replace(tiny.SMALL, **changes)
    monkeypatch.setattr(cli, "parse", lambda _: config)
    assert main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: worker 1 was lost 4 times in a row; to resume later: ")


def test_without_ray_one_line_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = tmp_path / "run"
    assert main(["digits", "--method", "async-lsgd", "--run-dir", str(folder)]) == 2
    assert 'pip install -e ".[async]"' in capsys.readouterr().err
    assert not folder.exists()


def test_the_last_known_state_of_a_hanging_worker_is_saved(ran):
    """If the run is stopped meanwhile, the worker keeps its own state, not a peer's."""

    def hangs(status, remote):
        if status.reports[0].steps >= 8 and 1 in status.present:
            remote.lose(1)
            signal.raise_signal(signal.SIGTERM)

    run, result = ran(SLOW | {"befalls": hangs})
    assert (result.stopped_by, result.saved) == (signal.SIGTERM, True)
    rows = np.asarray(jax.tree.leaves(run.state.params)[-1])
    assert not any(np.array_equal(rows[1], rows[i]) for i in (0, 2, 3))


def test_a_run_without_remaining_steps_has_not_diverged(ran):
    """The only worker has taken all its steps, so its loss is unknown, not nan."""

    def signaled(status, remote):
        if sum(report.steps for report in status.reports.values()) >= 44:
            signal.raise_signal(signal.SIGTERM)

    _, result = ran(SLOW | {"befalls": signaled})
    assert result.step < 12
    run, result = ran(EVEN, workers=WorkersConfig(1, 1), resume=True)
    assert run.state.engine.count.tolist()[0] >= 12  # no step was left
    assert result.is_good and result.tested.is_finite and result.step == 12
    assert all(event["loss"] is not None for event in log.read(result.folder)["train"])


@pytest.mark.slow  # `test_resharding.py` has the states of other grids
def test_workers_that_are_all_lost_find_the_checkpoint_of_another_grid(ran, opened):
    """Each gets the state with which resuming the run by hand would begin."""
    _, result = ran(SLOW, steps=6)
    for grid in (WorkersConfig(2, 2), WorkersConfig(1, 2)):
        run = opened(workers=grid, resume=True, steps=6)
        for index, state in enumerate(run.experiment.apart(run.state)):
            found = asynchronous.from_checkpoint(run.config, result.folder, index)
            for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_worker_that_takes_no_steps_is_named_once(opened, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(asynchronous.time, "monotonic", lambda: now[0])
    run = opened(log_every=100, test_every=100, checkpoint_every=100, steps=90)
    follower = asynchronous.Follower(run, run.experiment)
    remote = SimpleNamespace(ended={})

    def told(seconds, *steps):
        now[0] = seconds
        reports = {i: WorkerReport(n, 1.0 if n else None) for i, n in enumerate(steps)}
        follower(Status([0, 1, 2, 3], [], sum(steps), 0, reports), remote)
        return [x for x in capsys.readouterr().out.splitlines() if "no step" in x]

    assert told(1, 3, 3, 3, 0) == told(29, 3, 9, 9, 0) == []  # worker 3 compiles
    assert told(500, 3, 9, 9, 0) == []  # no worker steps, as in a test
    (line,) = told(501, 3, 10, 10, 0)
    assert "worker 0 has taken no step for 30 s; it is started again after 300 s" in line
    assert told(531, 3, 11, 11, 0) == told(532, 4, 11, 11, 0) == []
    assert len(told(563, 4, 12, 12, 0)) == 1


@pytest.mark.slow
def test_a_worker_that_does_not_answer_is_named(ran, monkeypatch, capsys):
    states = simulated_engine.Remote.states
    silent = lambda self, own=True: [*states(self)[:2], None, *states(self)[3:]]
    monkeypatch.setattr(simulated_engine.Remote, "states", silent)
    ran(EVEN)
    said = "worker 2 does not answer: the best worker's state stands for its own"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("answers", [True, False])
def test_a_stop_after_the_loss_of_all_workers_saves_the_steps_that_are_left(
    answers, opened
):
    run = opened()
    first = run.experiment.apart(run.state)
    follower = asynchronous.Follower(run, run.experiment)
    status = lambda n: Status(
        [0, 1, 2, 3], [], 4 * n, 0, dict.fromkeys(range(4), WorkerReport(n, 1.0))
    )
    states = lambda n: [state | {"count": n} for state in first]
    known = states if answers else lambda n: [None] * 4
    remote = SimpleNamespace(ended={}, states=lambda own: known(10), stop=lambda: None)
    follower(status(10), remote)
    assert run.step == 10
    follower(status(6), remote)  # they go on from a checkpoint
    run.stop_signals.received = signal.SIGTERM
    follower(status(7), remote)
    follower.end(known(7), status(7))
    left = 7 if answers else 0  # no state is known but the first
    assert (run.step, int(run.state.step.value)) == (left, left)
    assert run.state.engine.count.tolist() == [left] * 4
