"""Landscapes of several methods, from the command to the arrays."""

import contextlib
import dataclasses
import io
import pathlib
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from landscapes import QUICK, SMALL, but, contents, draw

from paper.landscape import loss, trajectory
from paper.landscape.cli import LandscapeOptions
from paper.landscape.compute import compute_landscape, pulls_of
from paper.landscape.points import Points
from train.config import WorkersConfig, methods
from train.metrics import log
from train.task.datasets import load_dataset
from train.task.experiment import Experiment


def arrays_in(folder):
    with np.load(folder / "landscape.npz") as file:
        return dict(file)


def all_workers(state):
    """Returns the parameters of all workers, float64 [W, P]."""
    rows = [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(state.params)]
    return np.concatenate(rows, axis=1, dtype=np.float64)


def plane_of(arrays, workers):
    """Returns o, u, v of a landscape, computed in float64 from the marks in its plane."""
    named = {"the center": workers.mean(axis=0)} | dict(enumerate(workers))
    origin = workers[int(arrays["worker"])]
    corners = [
        (named.get(name) if name in named else named[int(name.split()[1])], place)
        for name, place in zip(arrays["mark_names"].tolist(), arrays["mark_places"])
        if place[2] < 1e-4 and np.any(place[:2])
    ]
    (first, (a, *_)), (second, (b, c, _)) = corners[:2]
    u = (first - origin) / a
    return origin, u, (second - origin - b * u) / c


def loss_at(saved, point, images):
    """Returns the loss and the error in % over the images of the landscape."""
    dataset, transforms = saved.data
    batches = loss.batches_of(dataset.train, images, saved.config.seed)
    x, labels = (np.concatenate(parts) for parts in zip(*batches))
    _, as_tree = ravel_pytree(jax.tree.map(lambda x: x[0], saved.state.params))
    params = as_tree(jnp.asarray(point, jnp.float32))
    logits = saved.experiment.forward.model.apply(
        {"params": params}, transforms.test(x), False
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return float(losses.mean()), float(100 * np.mean(logits.argmax(axis=1) != labels))


@pytest.fixture(scope="module")
def drawn(run, tmp_path_factory):
    """A run folder with its landscape: (folder, what it held before, what was printed)."""
    folder = shutil.copytree(run, tmp_path_factory.mktemp("drawn") / "run")
    before, printed = contents(folder), io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert draw([str(folder), "--grid", "5", "--images", "200", "--test"]) == 0
    return folder, before, printed.getvalue()


@pytest.mark.slow
def test_only_the_figure_and_the_arrays_are_written(drawn):
    folder, before, printed = drawn
    after = contents(folder)
    assert after.keys() - before.keys() == {"landscape.png", "landscape.npz"}
    assert {name: after[name] for name in before} == before
    assert (folder / "landscape.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert printed.endswith(f"{folder}/landscape.png\n{folder}/landscape.npz\n")


def test_the_trajectory_ends_exactly_at_the_checkpoint(drawn):
    folder, _, printed = drawn
    assert "retracing the trajectory from step 6 to 12 (6 steps" in printed
    assert "warning" not in printed
    arrays = arrays_in(folder)
    assert arrays["steps"].tolist() == list(range(6, 13))
    np.testing.assert_array_equal(arrays["paths"][-1], arrays["positions"])
    np.testing.assert_array_equal(arrays["positions"][arrays["worker"]], 0)


@pytest.mark.slow
def test_positions_agree_with_the_checkpoints_in_float64(drawn, saved):
    arrays, end = arrays_in(drawn[0]), all_workers(saved.state)
    origin, u, v = plane_of(arrays, end)
    np.testing.assert_allclose([u @ u, u @ v, v @ v], [1, 0, 1], atol=1e-5)
    begin = all_workers(saved.state_at(6))
    for seen, points in ((arrays["paths"][0], begin), (arrays["positions"], end)):
        gaps = points - origin
        a, b = gaps @ u, gaps @ v
        off = np.linalg.norm(gaps - np.outer(a, u) - np.outer(b, v), axis=1)
        np.testing.assert_allclose(seen, np.stack([a, b, off], 1), rtol=1e-4, atol=1e-4)


def test_leaders_are_the_last_ones_in_the_runs_log(drawn):
    folder, *_ = drawn
    arrays, elections = arrays_in(folder), log.read(folder)["leaders"]
    worker, names = int(arrays["worker"]), arrays["mark_names"].tolist()
    last = {e["level"]: e["leaders"] for e in elections}
    node = worker // 2
    for role, leader in (
        (f"leader of node {node}", last["node"][node]),
        ("leader of all", last["all"][0]),
    ):
        (name,) = [name for name in names if role in name]
        assert name.startswith(f"worker {leader} (")
    assert worker == int(np.argmax(elections[-1]["scores"]))
    assert names[0].startswith(f"worker {worker}") and "the center" in names


@pytest.mark.slow
def test_losses_agree_with_the_models_at_these_points(drawn, saved):
    """Checks the worker itself and places of the grid: rows are ys, columns xs."""
    arrays = arrays_in(drawn[0])
    origin, u, v = plane_of(arrays, all_workers(saved.state))
    of_worker = loss_at(saved, origin, 200)[0]
    assert arrays["mark_losses"][0] == pytest.approx(of_worker, rel=1e-5)
    for i, j in ((0, 0), (4, 0), (0, 4), (1, 3)):
        point = origin + arrays["xs"][i] * u + arrays["ys"][j] * v
        expected, error = loss_at(saved, point, 200)
        assert arrays["train_loss"][j, i] == pytest.approx(expected, rel=1e-4)
        assert arrays["train_error"][j, i] == pytest.approx(error, abs=0.51)
    assert arrays["train_images"] == arrays["test_images"] == 200
    assert ((arrays["test_error"] >= 0) & (arrays["test_error"] <= 100)).all()


def test_pulls_on_the_trajectory(saved):
    points = Points(saved, 3)
    node, everyone = pulls_of(points, saved, range(6, 12))
    assert node.name == "pull to the leader of node 1"
    assert everyone.name == "pull to the leader of all"
    assert node.steps.tolist() == [8, 10, 12] and everyone.steps.tolist() == [8, 12]


FROM_THE_START = "and the start of training, along random direction 0"


@pytest.mark.slow  # the landscape `drawn` has a method with leaders
@pytest.mark.parametrize(
    "method, count, through, marks",
    [
        (methods.make("easgd", period=2), 3, "worker 2, the center and worker 0 (best)", 3),
        (methods.make("allreduce"), 3, f"worker 2 {FROM_THE_START}", 3),
        (methods.make("independent"), 1, f"worker 0 {FROM_THE_START}", 2),
    ],
)
def test_methods_without_leaders(method, count, through, marks):
    """Draws the landscape after three steps, without a run folder."""
    grid = WorkersConfig(nodes=1, locals=count)
    config = dataclasses.replace(SMALL, method=method, workers=grid)
    data = load_dataset(config)
    experiment = Experiment(config, data)
    state = experiment.init()
    for step in range(3):
        state, _ = trajectory.advance(experiment, state, step)
    case = but(
        SimpleNamespace(config=config, data=data, experiment=experiment, step=3),
        folder=pathlib.Path("nowhere"),
        state=state,
        recent=np.arange(float(count)),
        _steps=[],
        _began=grid,
    )
    lines = []
    options = LandscapeOptions(
        pathlib.Path("nowhere"), **QUICK, path_steps=9 if count > 1 else 0
    )
    result = compute_landscape(case, options, lines.append)
    assert not any("warning" in line for line in lines)
    assert f"the plane through {through}" in result.title
    assert len(result.marks) == marks and np.isfinite(result.maps[0].loss).all()
    assert result.steps.tolist() == ([0, 1, 2, 3] if count > 1 else [3])
