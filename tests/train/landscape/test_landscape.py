"""The landscape of runs of several methods: what it shows, and what it leaves alone."""

import contextlib
import dataclasses
import hashlib
import io
import pathlib
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.flatten_util import ravel_pytree

import lsgd_jax as lj
from train.config import WorkersConfig
from train.data.arrays import DataError
from train.landscape import __main__ as command
from train.landscape import loss, plots, trajectory
from train.landscape.__main__ import main, parse
from train.landscape.compute import compute_landscape, pulls_of
from train.landscape.plane import Plane, flat
from train.landscape.points import Points, leaders_of
from train.landscape.results import Landscape, Map, Mark, Pulls
from train.landscape.saved_run import SavedRun
from train.metrics import log
from train.run.loop import train
from train.run.open import open_run
from train.task import methods
from train.task.datasets import load_dataset
from train.task.experiment import Experiment


SMALL = dataclasses.replace(tiny.SMALL, test_every=12)
QUICK = "--grid 3 --images 32".split()


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        tiny.install(share=True, set=patch.setattr)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run with the checkpoints of steps 6 and 12."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(open_run(dataclasses.replace(SMALL, run_dir=str(folder))))
    return folder


@pytest.fixture(scope="module")
def saved(run):
    return SavedRun(run, None, None, pytest.fail)


def but(saved, **changes):
    """The same saved run, but for some attributes."""
    other = object.__new__(SavedRun)
    other.__dict__.update(saved.__dict__ | changes)
    return other


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def contents(folder):
    """Every file of a folder and what it holds."""
    return {
        str(path.relative_to(folder)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def numbers_in(folder):
    with np.load(folder / "landscape.npz") as file:
        return dict(file)


def all_workers(state):
    """All workers' parameters, float64 [W, P]."""
    rows = [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(state.params)]
    return np.concatenate(rows, axis=1, dtype=np.float64)


def plane_of(numbers, workers):
    """o, u, v of a landscape, laid again in float64 through the marks that lie in it."""
    named = {"the center": workers.mean(axis=0)} | dict(enumerate(workers))
    origin = workers[int(numbers["worker"])]
    corners = [
        (named.get(name) if name in named else named[int(name.split()[1])], place)
        for name, place in zip(numbers["mark_names"].tolist(), numbers["mark_places"])
        if place[2] < 1e-4 and np.any(place[:2])
    ]
    (first, (a, *_)), (second, (b, c, _)) = corners[:2]
    u = (first - origin) / a
    return origin, u, (second - origin - b * u) / c


def loss_at(saved, point, images):
    """The loss and the error in % over the landscape's images, worked out in one go."""
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


# From the command to the files


@pytest.fixture(scope="module")
def drawn(run, tmp_path_factory):
    """A run folder with its landscape: (folder, what it held before, what was printed)."""
    folder = shutil.copytree(run, tmp_path_factory.mktemp("drawn") / "run")
    before, printed = contents(folder), io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([str(folder), "--grid", "5", "--images", "200", "--test"]) == 0
    return folder, before, printed.getvalue()


def test_only_the_figure_and_the_numbers_are_written(drawn):
    folder, before, printed = drawn
    after = contents(folder)
    assert after.keys() - before.keys() == {"landscape.png", "landscape.npz"}
    assert {name: after[name] for name in before} == before
    assert (folder / "landscape.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert printed.endswith(f"{folder}/landscape.png\n{folder}/landscape.npz\n")


def test_path_ends_where_the_checkpoint_is_to_the_bit(drawn):
    folder, _, printed = drawn
    assert "retracing the trajectory from step 6 to 12 (6 steps" in printed
    assert "warning" not in printed
    numbers = numbers_in(folder)
    assert numbers["steps"].tolist() == list(range(6, 13))
    np.testing.assert_array_equal(numbers["paths"][-1], numbers["positions"])
    np.testing.assert_array_equal(numbers["positions"][numbers["worker"]], 0)


def test_places_are_those_of_the_checkpoints_in_double_precision(drawn, saved):
    numbers, end = numbers_in(drawn[0]), all_workers(saved.state)
    origin, u, v = plane_of(numbers, end)
    np.testing.assert_allclose([u @ u, u @ v, v @ v], [1, 0, 1], atol=1e-5)
    begin = all_workers(saved.state_at(6))
    for seen, points in ((numbers["paths"][0], begin), (numbers["positions"], end)):
        gaps = points - origin
        a, b = gaps @ u, gaps @ v
        off = np.linalg.norm(gaps - np.outer(a, u) - np.outer(b, v), axis=1)
        np.testing.assert_allclose(seen, np.stack([a, b, off], 1), rtol=1e-4, atol=1e-4)


def test_leaders_are_those_that_the_run_noted_last(drawn):
    folder, *_ = drawn
    numbers, elections = numbers_in(folder), log.read(folder)["leaders"]
    worker, names = int(numbers["worker"]), numbers["mark_names"].tolist()
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


def test_values_are_those_of_the_models_there(drawn, saved):
    """Of the worker itself, and at places of the grid: rows are ys, columns xs."""
    numbers = numbers_in(drawn[0])
    origin, u, v = plane_of(numbers, all_workers(saved.state))
    of_worker = loss_at(saved, origin, 200)[0]
    assert numbers["mark_losses"][0] == pytest.approx(of_worker, rel=1e-5)
    for i, j in ((0, 0), (4, 0), (0, 4), (1, 3)):
        point = origin + numbers["xs"][i] * u + numbers["ys"][j] * v
        expected, error = loss_at(saved, point, 200)
        assert numbers["train_loss"][j, i] == pytest.approx(expected, rel=1e-4)
        assert numbers["train_error"][j, i] == pytest.approx(error, abs=0.51)
    assert numbers["train_images"] == numbers["test_images"] == 200
    assert ((numbers["test_error"] >= 0) & (numbers["test_error"] <= 100)).all()


@pytest.fixture
def computed(monkeypatch):
    """The command with a landscape that is known already."""
    known = landscape_of(np.eye(3), [[1, 1, 1], [0, 0, 0]], [Mark("a", np.zeros(3), 1.0)])
    monkeypatch.setattr(command, "SavedRun", lambda *args: None)
    monkeypatch.setattr(command, "compute_landscape", lambda *args: known)


def test_own_results_are_drawn_again_and_others_are_left_alone(copied, computed, capsys):
    assert main([str(copied)]) == 0 and main([str(copied)]) == 0
    before = contents(copied)
    for name in ("landscape.png", "landscape.npz"):
        own = (copied / name).read_bytes()
        (copied / name).write_text("mine")
        capsys.readouterr()
        assert main([str(copied)]) == 2
        assert f"{name} is there and not from this" in capsys.readouterr().err
        assert (copied / name).read_text() == "mine"
        (copied / name).write_bytes(own)
    assert contents(copied) == before


def test_results_go_elsewhere_if_asked(run, computed, tmp_path):
    before = contents(run)
    assert main([str(run), "--out", str(tmp_path / "a" / "b")]) == 0
    assert contents(run) == before
    names = {path.name for path in (tmp_path / "a" / "b").iterdir()}
    assert names == {"landscape.png", "landscape.npz"}


def test_a_full_disk_leaves_the_old_results(tmp_path):
    (tmp_path / "landscape.png").write_bytes(b"old")

    def fill(file):
        file.write(b"half of")
        raise OSError("no space left on device")

    with pytest.raises(OSError):
        command.write(tmp_path / "landscape.png", fill)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_what_goes_wrong_while_working(run, computed, monkeypatch, capsys, tmp_path):
    for error, status in ((KeyboardInterrupt(), 130), (OSError("disk full"), 1)):

        def fail(*args, error=error):
            raise error

        monkeypatch.setattr(command, "compute_landscape", fail)
        assert main([str(run), "--out", str(tmp_path)]) == status
        assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


# Checkpoints


def test_a_damaged_checkpoint_is_left_as_it_is(copied, saved, monkeypatch, capsys):
    build = lambda config, data: saved.experiment
    monkeypatch.setattr("train.landscape.saved_run.Experiment", build)
    (broken,) = copied.glob("checkpoints/12/state/_METADATA")
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    before = contents(copied)
    assert main([str(copied), "--step", "12"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: the checkpoint of step 12 can not be read: ")
    lines = []
    assert SavedRun(copied, None, None, lines.append).step == 6
    assert len(lines) == 1 and "the checkpoint of step 12 can not be read" in lines[0]
    (copied / "checkpoints/6/state/_METADATA").write_bytes(b"")
    assert main([str(copied)]) == 2
    assert "holds no checkpoint that can be read" in capsys.readouterr().err
    assert contents(copied).keys() == before.keys()


# The trajectory


def retraced(saved, most=100):
    """The trajectory to a checkpoint, on a plane along two parameters, and what is said."""
    lines = []
    origin = flat(jax.tree.map(lambda x: x[0], saved.state.params))
    basis = np.eye(2, origin.size, dtype=np.float32)
    path = trajectory.Trajectory(saved, most, lines.append)
    return path, path.on(Plane(origin, basis)), lines


def test_the_first_checkpoint_is_reached_from_the_start_of_training(saved):
    first = but(saved, step=6, state=saved.state_at(6))
    path, paths, lines = retraced(first)
    assert path.steps == range(6) and paths.shape == (7, 4, 3)
    assert not any("warning" in line for line in lines)
    # All workers start in one point.
    assert np.ptp(paths[0], axis=0).max() == 0 and np.ptp(paths[-1]) > 0


def test_a_trajectory_that_ends_elsewhere_is_reported(saved, monkeypatch):
    advance = trajectory.advance
    monkeypatch.setattr(
        trajectory, "advance", lambda e, state, step: advance(e, state, step + 1)
    )
    _, _, lines = retraced(saved)
    (line,) = [line for line in lines if "warning" in line]
    assert "does not end where the checkpoint is" in line


def test_a_trajectory_that_is_too_long_is_left_out_and_said(saved):
    path, paths, lines = retraced(saved, most=5)
    assert len(path.steps) == len(paths) == 0
    (line,) = lines
    assert line.startswith("the trajectory from step 6 to 12 is left out (6 steps")
    assert line.endswith("--path-steps 6 retraces it")
    assert retraced(saved, most=0)[2] == []


def test_pulls_of_path_are_those_of_the_method(saved):
    points = Points(saved, 3)
    node, everyone = pulls_of(points, saved, range(6, 12))
    assert node.name == "pull to the leader of node 1"
    assert everyone.name == "pull to the leader of all"
    assert node.steps.tolist() == [8, 10, 12] and everyone.steps.tolist() == [8, 12]


# Any method, any worker


def level(leader, score, axes):
    return SimpleNamespace(leader=leader, score=score, axes=axes)


def test_leaders_by_the_last_election_or_by_scores():
    scores = np.array([4.0, 1.0, 3.0, 2.0, 9.0, 0.5])  # 2 nodes of 3 workers
    of_node = level(np.array([1, 1, 1, 2, 2, 2]), scores, ("local",))
    of_all = level(np.array([5] * 6), scores, ("node", "local"))
    assert leaders_of(0, [of_node, of_all], scores, nodes=2) == [
        ("leader of node 0", 1),
        ("leader of all", 5),
    ]
    assert leaders_of(3, [of_node, of_all], scores, nodes=2) == [
        ("leader of node 1", 5),
        ("leader of all", 5),
    ]
    never = level(np.full(6, -1), scores, ("local",))
    assert leaders_of(2, [never], scores, nodes=2) == [("leader of node 0", 1)]
    one = level(np.array([3] * 6), scores, ("local",))
    assert leaders_of(2, [one, one], scores, nodes=1) == [("leader", 3)]
    assert leaders_of(2, [level(None, None, ("local",))], scores, nodes=2) == []


@pytest.mark.parametrize(
    "method, count, retrace, through, marks",
    [
        (
            methods.make("easgd", period=2),
            3,
            True,
            "worker 2, the center and worker 0 (best)",
            3,
        ),
        (
            methods.make("allreduce"),
            *(3, True),
            "worker 2, along principal direction 1 of the trajectory and principal dir",
            2,
        ),
        (
            methods.make("independent"),
            *(1, False),
            "worker 0 and the start of training, along random direction 0",
            2,
        ),
    ],
)
def test_methods_without_leaders(method, count, retrace, through, marks):
    """After three steps, which need no run folder."""
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
        _archive=SimpleNamespace(steps=[]),
        _began=grid,
    )
    lines = []
    options = parse(["nowhere", *QUICK, "--path-steps", "9" if retrace else "0"])
    result = compute_landscape(case, options, lines.append)
    assert not any("warning" in line for line in lines)
    assert f"the plane through {through}" in result.title
    assert len(result.marks) == marks and np.isfinite(result.maps[0].loss).all()
    assert result.steps.tolist() == ([0, 1, 2, 3] if retrace else [3])


def test_the_worst_worker_that_does_not_lead_is_shown(saved, monkeypatch):
    """Worker 1 leads its node still, but has had the worst losses since."""

    scores = np.array([2.0, 9.0, 3.0, 1.0])
    node, everyone = lj.diagnostics(saved.state.opt_state)
    pulls = [
        dataclasses.replace(node, leader=np.array([1, 1, 1, 1]), score=scores),
        dataclasses.replace(everyone, leader=np.full(4, 3), score=scores),
    ]
    monkeypatch.setattr(lj, "diagnostics", lambda opt_state: pulls)
    assert Points(saved, None).worker == 2
    assert Points(saved, 1).roles == [("leader of node 0", 1), ("leader of all", 3)]


def test_workers_that_are_not_finite(saved):
    """They are neither chosen nor a hindrance, and only named if asked for."""
    worker = Points(saved, None).worker
    poisoned = jax.tree.map(lambda x: x.at[worker].set(jnp.nan), saved.state.params)
    sick = saved.state._replace(params=lj.Workers(2, 2).put(poisoned))
    ill = but(saved, state=sick)
    with pytest.raises(ValueError, match=f"`worker` must have finite .* got {worker=}"):
        Points(ill, worker)
    options = parse([str(saved.folder), *QUICK, "--path-steps", "0"])
    result = compute_landscape(ill, options, lambda line: None)
    assert result.worker != worker and np.isnan(result.positions[worker]).all()
    assert np.isfinite(result.maps[0].loss).all()
    plots.draw(result, io.BytesIO(), "test")
    diverged = jax.tree.map(lambda x: x * jnp.nan, saved.state.params)
    with pytest.raises(ValueError, match="no worker has finite parameters at step 12"):
        Points(but(saved, state=saved.state._replace(params=diverged)), None)
    with pytest.raises(ValueError, match="`worker` must be in 0..3, got worker=-1"):
        Points(saved, -1)


# The loss


def test_batch_statistics_are_those_of_the_images_at_the_point():
    """As the network sees a batch while training; the workers' own are not used."""
    config = dataclasses.replace(SMALL, model="digits-bn")
    dataset, transforms = load_dataset(config)
    ((images, labels),) = loss.batches_of(dataset.train, 64, seed=0)
    model, x = loss.MODELS["digits-bn"](), transforms.test(images)
    variables = jax.jit(lambda: model.init(jax.random.key(0), x, train=False))()
    params = variables["params"]
    spoiled = jax.tree.map(lambda x: x + 7, {"batch_stats": variables["batch_stats"]})
    state = jax.tree.map(lambda x: x[None], {"params": params, "stats": spoiled})
    case = SimpleNamespace(
        config=config, data=(dataset, transforms), state=SimpleNamespace(**state)
    )
    measure = jax.jit(loss.measure_of(case))
    logits, _ = model.apply(variables, x, True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    expected = [float(losses.sum()), float(np.sum(logits.argmax(axis=1) != labels))]
    seen = measure(jnp.asarray(flat(params)), (images, labels))
    np.testing.assert_allclose(seen, expected, rtol=1e-5)


def test_as_many_points_at_a_time_as_fit_into_half_the_memory():
    measure = lambda point, batch: jnp.tanh(jnp.outer(point, batch)).sum()[None]
    point, batch = jnp.ones(1000), jnp.ones(1000)
    chunk = lambda free: loss.fitting_chunk(
        *(measure, point, batch),
        SimpleNamespace(
            platform="gpu",
            memory_stats=lambda: {"bytes_limit": free + 10**6, "bytes_in_use": 10**6},
        ),
    )
    assert chunk(0) == 1 and chunk(10**12) == loss.MOST_POINTS
    assert loss.fitting_chunk(measure, point, batch, jax.devices()[0]) == 1
    without = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    assert loss.fitting_chunk(measure, point, batch, without) == 1


# The figure


def landscape_of(values, path, marks):
    steps = np.arange(max(1, len(path)))
    return Landscape(
        *("title", "x", "y", 0, np.linspace(-1, 1, 3), np.linspace(-1, 1, 3)),
        maps=[Map("train", 9, values, values), Map("test", 9, values, values)],
        marks=marks,
        positions=np.array([[0, 0, 0], [np.nan] * 3]),
        steps=steps,
        paths=np.asarray(path, float).reshape(-1, 1, 3),
        pulls=[Pulls("pull", steps[1:])],
    )


@pytest.mark.parametrize(
    "values, path",
    [
        (np.full((3, 3), np.nan), []),
        (np.full((3, 3), np.inf), [[0, 0, 0]] * 3),
        (np.zeros((3, 3)), [[np.nan] * 3] * 2),
        (np.full((3, 3), 2.5), [[1e20, 1, 1e20], [0, 0, 0]]),
        (
            np.array([[1, np.inf, 3], [1e25, 5, np.nan], [0, 1e-30, 9]]),
            [[1, 1, 2], [np.nan] * 3, [0, 0, 0]],
        ),
    ],
    ids=["nan", "inf", "zero", "flat", "cliffs"],
)
def test_any_values_and_any_trajectory_can_be_drawn(values, path):
    marks = [Mark("a", np.zeros(3), 1.0), Mark("b", np.array([1, 1, 4.0]), np.nan)]
    file = io.BytesIO()
    plots.draw(landscape_of(values, path, marks), file, "author")
    assert file.getvalue()[:4] == b"\x89PNG" and b"author" in file.getvalue()


def test_levels_rise_and_cover_everything():
    for values in (np.array([0.0, 1e-7, 3.0]), np.array([2.3, 2.31]), np.array([-4.0])):
        for logarithmic in (True, False):
            levels = plots.levels_of(values, logarithmic)
            assert (np.diff(levels) > 0).all()
            assert levels[0] <= values.min() and levels[-1] >= values.max() * (1 - 1e-12)


# Wrong usage


@pytest.mark.parametrize(
    "options, message",
    [
        ("--worker 4", "`worker` must be in 0..3, got worker=4"),
        ("--step 7", "`step` must be that of a checkpoint (6, 12), got step=7"),
        ("--grid 1", "`grid` must be at least 2, got grid=1"),
        ("--images 0", "`images` must be a positive int, got images=0"),
        ("--chunk 0", "`chunk` must be a positive int, got chunk=0"),
        ("--path-steps -1", "`path_steps` must be at least 0, got path_steps=-1"),
        ("--margin nan", "`margin` must be at least 0, got margin=nan"),
        ("--grid x", "argument --grid: invalid int value"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(run, options, message, capsys, tmp_path):
    before = contents(run)
    assert main([str(run), *options.split(), "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}") and printed.count("\n") == 1
    assert contents(run) == before and not list(tmp_path.iterdir())


def test_no_run_and_no_checkpoint(run, tmp_path, capsys):
    out = tmp_path / "out"
    for folder in (tmp_path / "nowhere", tmp_path):
        assert main([str(folder), "--out", str(out)]) == 2
        assert "holds no configuration of a run" in capsys.readouterr().err
    shutil.copy(run / "config.json", tmp_path)
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} holds no checkpoint yet" in capsys.readouterr().err
    assert main([]) == 2
    assert "the following arguments are required: run" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}


def test_data_that_have_moved(run, monkeypatch, capsys, tmp_path):
    def load(config):
        raise DataError(f"nothing in {config.data.dir}")

    monkeypatch.setattr("train.landscape.saved_run.load_dataset", load)
    for options, place in ((["--data-dir", "there"], "there"), ([], "None")):
        assert main([str(run), *options, "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"error: nothing in {place}\n"


def test_a_place_that_is_no_folder(run, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main([str(run), "--out", str(tmp_path / "file")]) == 2
    assert "can not take the results" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_that_went_on_with_other_workers(run, tmp_path):
    """Each checkpoint is read with its own workers; trajectories begin where they did."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    workers = WorkersConfig(nodes=1, locals=2)
    more = {"steps": 18, "workers": workers, "run_dir": str(folder), "resume": True}
    train(open_run(dataclasses.replace(SMALL, **more)))
    latest = SavedRun(folder, None, None, pytest.fail)
    assert latest.step == 18 and latest.experiment.workers.num_workers == 2
    assert latest.step_before() == 18  # four workers' steps can not be retraced to here
    before = SavedRun(folder, 12, None, pytest.fail)
    assert before.experiment.workers.num_workers == 4 and before.step_before() == 6
