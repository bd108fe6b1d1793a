"""Runs of the trainer in this process: what they leave, resuming, and what goes wrong."""

import dataclasses
import gc
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import exchanges

import lsgd_jax as lj
from configs.digits import CONFIG
from train.config import DataConfig, OptimizerConfig, WorkersConfig
from train.metrics import log as records
from train.metrics import plots as figures
from train.run.loop import Run
from train.task import methods
from train.task.experiment import Experiment


SMALL = dataclasses.replace(
    CONFIG,
    workers=WorkersConfig(nodes=2, locals=2),
    method=methods.make("lsgd", local_period=2, global_period=4, loss_window=3),
    steps=12,
    batch_size=16,
    log_every=4,
    test_every=6,
    checkpoint_every=6,
)


def leaves(state):
    """All numbers of a training state, on the host."""
    key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    plain = lambda x: np.asarray(jax.random.key_data(x) if key(x) else x)
    return {
        jax.tree_util.keystr(path): plain(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def assert_equal_to_the_bit(state, other):
    a, b = leaves(state), leaves(other)
    assert a.keys() == b.keys() and len(a) > 10
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.fixture(scope="module")
def traces():
    """Of every trace of a training step, its experiment; two traces make a compilation."""
    seen, step = [], Experiment._step

    def counted(self, *arguments):
        seen.append(self)
        return step(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "_step", counted)
        yield seen


@pytest.fixture(scope="module")
def finished(tmp_path_factory, traces):
    """A run to the end: (run, result)."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run = Run(dataclasses.replace(SMALL, run_dir=str(folder)))
    return run, run.train()


@pytest.fixture
def copied(finished, tmp_path):
    """The configuration of a copy of the finished run's folder, to resume it."""
    folder = shutil.copytree(finished[1].folder, tmp_path / "copy")
    return dataclasses.replace(SMALL, run_dir=str(folder), resume=True)


# What a run leaves


def test_the_run_folder_holds_everything(finished):
    _, result = finished
    names = {path.name for path in result.folder.iterdir()}
    expected = "config.json metrics.jsonl tensorboard checkpoints training.png leaders.png"
    assert names >= {*expected.split(), "consensus.png"}
    assert {path.name for path in (result.folder / "checkpoints").iterdir()} >= {"6", "12"}
    assert any((result.folder / "tensorboard").iterdir())
    for png in result.folder.glob("*.png"):
        assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_result_is_that_of_the_last_test(finished):
    _, result = finished
    assert (result.step, result.stopped_by, result.saved) == (12, None, True)
    last = records.read(result.folder)["test"][-1]
    assert last["step"] == 12
    assert last["center_error"] == result.center_error
    assert last["best_error"] == result.best_error


def test_metrics_hold_every_interval_every_election_and_every_test(finished):
    _, result = finished
    events = records.read(result.folder)
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
    last = events["train"][-1]
    assert last["loss"] < events["train"][0]["loss"]
    assert last["consensus_distance"] > 0 and last["healed"] == last["waiting"] == 0
    for line in (result.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_bytes_sent_are_exchanges_times_parameters(finished):
    run, result = finished
    numbers = sum(x[0].size for x in jax.tree.leaves(run.state.params))
    exchanges = 12 // 2 + 12 // 4
    assert records.read(result.folder)["train"][-1]["bytes_sent"] == exchanges * 4 * (
        numbers + 1
    )


def test_steps_without_a_pull_communicate_nothing(finished):
    """Read from the compiled step: collectives stand in the two pulls' branches alone."""
    run, _ = finished
    experiment = run.experiment
    arguments = experiment.init(), experiment.data, experiment.batch(0)
    always, when_due = exchanges(experiment.step.lower(*arguments).compile().as_text())
    numbers = sum(x[0].size for x in jax.tree.leaves(run.state.params))
    assert always == 0
    assert when_due == [4 * (numbers + 1)] * 2


def test_figures_can_be_drawn_again(finished, capsys):
    _, result = finished
    assert figures.main([str(result.folder)]) == 0
    assert capsys.readouterr().out.count(".png") == 3
    assert figures.main([str(result.folder / "tensorboard")]) == 2
    assert "is no run folder" in capsys.readouterr().err


def test_testing_never_touches_the_training_state(finished):
    run, _ = finished
    before = leaves(run.state)
    run.experiment.test_center(run.state)
    run.experiment.test_worker(run.state, 3)
    after = leaves(run.state)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_the_tests_count_every_test_image_once(finished):
    """The error by batches over the workers is that of the whole test set at once."""
    run, _ = finished
    experiment = run.experiment
    batches = experiment._test_batches
    assert sum(int(valid.sum()) for *_, valid in batches) == 360
    params = jax.tree.map(lambda x: x[3], run.state.params)
    images = np.concatenate([np.asarray(i)[np.asarray(v)] for i, _, v in batches])
    labels = np.concatenate([np.asarray(k)[np.asarray(v)] for _, k, v in batches])
    x = experiment._transforms.test(jnp.asarray(images))
    logits = experiment._model.apply({"params": params}, x, False)
    error = 100 * np.mean(np.argmax(logits, axis=1) != labels)
    assert experiment.test_worker(run.state, 3).error == pytest.approx(error)


def test_the_step_compiles_once_and_its_buffers_are_donated(finished, traces):
    run, _ = finished
    assert traces.count(run.experiment) == 2
    experiment, state = run.experiment, run.experiment.init()
    experiment.step(state, experiment.data, experiment.batch(0))
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.size > 100]
    assert len(arrays) > 10 and all(leaf.is_deleted() for leaf in arrays)


# Resuming


def test_resuming_is_exact_to_the_bit(finished, tmp_path, traces):
    """run(12) equals run(6), stop, resume, run(6): everything that training changes."""
    folder = str(tmp_path / "run")
    Run(dataclasses.replace(SMALL, run_dir=folder, steps=6)).train()
    second = Run(dataclasses.replace(SMALL, run_dir=folder, resume=True))
    assert second.step == 6
    result = second.train()
    assert_equal_to_the_bit(finished[0].state, second.state)
    assert traces.count(second.experiment) == 2
    assert result.center_error == finished[1].center_error
    events = records.read(result.folder)
    assert [event["step"] for event in events["train"]] == [4, 6, 8, 12]
    seconds = [event["seconds"] for event in events["train"]]
    assert seconds == sorted(seconds)


def test_resuming_a_finished_run_tests_it_again(copied, finished):
    run = Run(copied)
    result = run.train()
    assert result.step == 12 and result.center_error == finished[1].center_error
    assert result.best_error == finished[1].best_error
    assert_equal_to_the_bit(finished[0].state, run.state)


def test_events_after_the_resumed_checkpoint_do_not_count(copied):
    path = f"{copied.run_dir}/metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"kind": "train", "step": 16, "seconds": 9, "loss": 1}\n{"kind": "tra')
    Run(dataclasses.replace(copied, steps=14)).train()
    events = records.read(finished_folder := Run(copied).folder)
    assert finished_folder.name == "copy"
    assert [event["step"] for event in events["train"]] == [4, 8, 12, 14]


# Orbax leaves coroutines behind when a restore fails; they complain when collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_truncated_checkpoint_falls_back_to_the_one_before(copied, capsys):
    broken = max((p for p in files_of(copied, 12)), key=lambda path: path.stat().st_size)
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    run = Run(copied)
    assert run.step == 6
    printed = capsys.readouterr().out
    assert "warning: the checkpoint of step 12 can not be read" in printed
    assert files_of(copied, "unreadable-12")  # set aside, not deleted
    assert run.train().step == 12
    gc.collect()


def files_of(config, step):
    folder = pathlib.Path(config.run_dir) / "checkpoints" / str(step)
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_readable_checkpoint_at_all(copied):
    for step in (6, 12):
        for path in files_of(copied, step):
            path.write_bytes(b"")
    with pytest.raises(ValueError, match="holds no checkpoint that can be read"):
        Run(copied)
    gc.collect()


def test_another_configuration_is_refused_and_named(copied):
    changed = dataclasses.replace(
        copied, seed=3, method=dataclasses.replace(copied.method, local_pull=0.5)
    )
    message = (
        "is a run of another configuration: method.local_pull: the run has 0.1, the "
        "command says 0.5; seed: the run has 0, the command says 3"
    )
    with pytest.raises(ValueError, match=message):
        Run(changed)


def test_a_folder_that_exists_is_never_overwritten(finished):
    _, result = finished
    before = {path: path.stat().st_mtime_ns for path in result.folder.rglob("*")}
    with pytest.raises(ValueError, match="must be a new folder, .* exists; add --resume"):
        Run(dataclasses.replace(SMALL, run_dir=str(result.folder)))
    assert before == {path: path.stat().st_mtime_ns for path in result.folder.rglob("*")}


# Numbers that are not finite


def test_no_finite_loss_stops_the_run_with_a_checkpoint(tmp_path, capsys):
    config = dataclasses.replace(
        SMALL,
        run_dir=str(tmp_path / "run"),
        optimizer=OptimizerConfig(learning_rate=1e30),
        steps=400,
        stop_after_nonfinite=5,
    )
    result = Run(config).train()
    assert result.stopped_by == "nonfinite" and result.saved
    assert 5 <= result.step <= 20
    assert (tmp_path / "run" / "checkpoints" / str(result.step)).is_dir()
    printed = capsys.readouterr().out
    assert "warning: no worker has had a finite loss for" in printed
    assert "no worker had a finite loss for 5 steps" in printed and "--resume" in printed


def test_a_worker_that_diverged_is_reported_and_healed(tmp_path, capsys):
    run = Run(dataclasses.replace(SMALL, run_dir=str(tmp_path / "run")))
    poisoned = jax.tree.map(lambda x: x.at[0].set(jnp.nan), run.state.params)
    placed = run.experiment.workers.put(poisoned)
    run.state = run.state._replace(params=placed)
    result = run.train()
    assert result.stopped_by is None and np.isfinite(result.center_error)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run.state.params))
    assert "the loss of worker 0 was not finite" in capsys.readouterr().out
    events = records.read(result.folder)
    assert events["train"][-1]["healed"] >= 1 and events["train"][-1]["waiting"] == 0
    assert all(0 not in e["leaders"] for e in events["leaders"] if e["step"] <= 4)
    momentum = [x for name, x in leaves(run.state).items() if "trace" in name]
    assert momentum and all(np.isfinite(x).all() for x in momentum)


# Data


def test_every_worker_may_have_a_part_of_its_own(tmp_path):
    config = dataclasses.replace(
        SMALL, run_dir=str(tmp_path / "run"), steps=4, data=DataConfig("digits", shard=True)
    )
    run = Run(config)
    images, labels = run.experiment.data
    assert images.shape == (4, 1437 // 4, 8, 8, 1) and labels.shape == (4, 1437 // 4)
    assert not isinstance(run.experiment.data, lj.Shared)
    rows = np.asarray(run.experiment.batch(0))
    assert rows.shape == (4, 16) and rows.max() < 1437 // 4
    assert run.train().step == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 2000}, "`batch_size` must be at most 1437"),
        (
            {"data": DataConfig("digits", shard=True), "workers": WorkersConfig(10, 20)},
            "`batch_size` must be at most 7, the number of training images per worker",
        ),
        ({"model": "cnn7"}, "`model` must fit the data: 'cnn7' takes 28 x 28 images"),
        ({"method": methods.make("lsgd", local_pull=3)}, "`local_pull` must be in"),
        ({"data": DataConfig("cifar10")}, "`data.dir` must name the folder"),
        ({"data": DataConfig("cifar10", dir="/no/such")}, "/no/such does not exist"),
    ],
)
def test_what_can_not_be_leaves_no_folder_behind(tmp_path, changes, message):
    config = dataclasses.replace(SMALL, run_dir=str(tmp_path / "run"), **changes)
    with pytest.raises(ValueError, match=message):
        Run(config)
    assert not (tmp_path / "run").exists()
