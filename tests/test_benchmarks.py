"""The benchmarks, in their smallest form."""

import importlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj
from train import compare
from train.data.arrays import Dataset, Images
from train.task.experiment import make_optimizer


ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # as for a script
leader, races, small, staleness, unequal = map(
    importlib.import_module,
    "leader races small_networks staleness when_to_follow".split(),
)


# races.py


def test_every_entrant_of_a_race_is_valid(tmp_path):
    given = ["text", "--entrants", "one-machine", "--out", str(tmp_path)]
    options, rest = races.parse([*given, "--rates", "0.01"])
    asked = [(name, 0.01) for name in races.entrants(options)]
    configs, _ = compare.parse(races.command(asked, options, rest, seeds=1))
    tokens = set()
    for config in configs.values():
        make_optimizer(config)
        workers = config.workers.nodes * config.workers.locals
        tokens.add(config.steps * config.batch_size * workers)
    assert len(configs) == 8 and tokens == {24_000}  # windows


# when_to_follow.py and leader.py


@pytest.mark.slow
def test_a_row_per_method_and_a_column_per_scenario(capsys, tmp_path):
    scenarios, seeds = ["equal workers", "adversary"], 2
    options = ["--seeds", str(seeds), "--steps", "80", "--scenarios", *scenarios]
    files = ["--json", str(tmp_path / "all.json"), "--figure", str(tmp_path / "all.png")]
    methods = ["--methods", "leader", "leader, judged by peers"]
    assert unequal.main([*methods, *options, *files]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split(" | ")[1:] == [scenarios[0], f"{scenarios[1]} |"]
    names, equal, lied = zip(*(row.strip("| ").split(" | ") for row in rows))
    assert names == ("leader", "leader, judged by peers")
    # An adversary that leads leaves a random network.
    assert [float(cell.split(" ± ")[0]) < 25 for cell in equal + lied] == [1, 1, 0, 1]
    numbers = json.loads((tmp_path / "all.json").read_text())
    assert [run.keys() for run in numbers["leader"]["adversary"]] == [
        {"center", "best worker", "rates"}
    ] * seeds
    assert (tmp_path / "all.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_text_of_its_own(capsys, tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 100)
    options = ["--seeds", "1", "--steps", "80", "--scenarios", "data apart"]
    task = ["--task", "text", "--files", str(tmp_path / "text")]
    assert unequal.main([*task, *options, "--methods", "mean (local SGD)"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert float(row.strip("| ").split(" | ")[1]) < 1.5  # of log 15 = 2.7


@pytest.mark.slow
def test_cnn7_takes_steps_that_end_at_an_exchange(monkeypatch):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (64, 32, 32, 3), np.uint8)
    made = Images(images, (np.arange(64) % 10).astype(np.uint8))
    both = Dataset(made, made, 10)
    monkeypatch.setattr(unequal.cifar10, "load", lambda *given, **named: both)
    task = unequal.cnn7_task("")
    train = small.trainer(task, unequal.default_methods(8)["leader"], steps=8, count=8)
    before, after = train(unequal.equal_workers(task, 0), 0, tested=(7, 8))
    assert not jax.tree.all(jax.tree.map(np.array_equal, *before.params[:2]))
    for params in after.params:
        same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
        jax.tree.map(same, params, after.center)
    assert 0 < task.tester()(after.center) <= 100
    np.testing.assert_allclose(after.rates, 0.05)


@pytest.mark.slow
def test_a_case_of_the_gain_of_a_leader():
    """Its workers differ in their rates, and are apart until the mean is taken."""
    rng = np.random.default_rng(0)
    images = rng.random((20, 8, 8, 3), np.float32)
    task = leader.task_of((images, np.arange(20) % 10) * 2)
    case = leader.Case(workers=2, pull=None, factor=4)
    np.testing.assert_allclose(case.setting(task).rate, [0.05, 0.2])
    (seen,) = leader.errors(case, task, seeds=1, steps=8)
    early, center, mean, best = seen
    assert center == mean == best and 0 <= early <= 100


def test_missing_data_end_it_with_one_line(capsys):
    for options in (["text", "--files", "no/such/file"], ["cifar10", "--cifar", "nowhere"]):
        with pytest.raises(SystemExit) as ended:
            unequal.main(["--task", *options])
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_scenarios_change_only_what_they_name():
    labels, inputs = np.arange(1440) % 10, np.zeros((1440, 1), np.float32)
    given: tuple = (inputs, labels, inputs, labels, 10, 0.1, "error in percent")
    task = unequal.Task(*given, start=None, logits=None)
    equal = unequal.equal_workers(task, 0)
    changed = {
        name: {
            field
            for field, before, after in zip(equal._fields, equal, make(task, 0))
            if not np.array_equal(before, after)
        }
        for name, make in unequal.SCENARIOS.items()
    }
    assert changed == {
        "equal workers": set(),
        "learning rates": {"rate"},
        "corrupted labels": {"labels"},
        "flipped bits": {"faults"},
        "data apart": {"rows"},
        "adversary": {"lies", "rate"},
    }
    rows = unequal.data_apart(task, 0).rows
    assert max(len(np.unique(labels[each])) for each in rows) <= 3


def test_a_fault_flips_one_bit():
    tree = {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}
    broken = small.with_fault(tree, jax.random.key(0), 1.0)
    unlike = [(x != y).sum() for x, y in zip(*map(jax.tree.leaves, (tree, broken)))]
    assert sum(unlike) == 1
    sound = small.with_fault(tree, jax.random.key(0), 0.0)
    assert jax.tree.all(jax.tree.map(np.array_equal, tree, sound))


def test_rates_travel_from_the_leader_and_vary():
    """The leader keeps its rate; each other worker takes it times 1, or 0.8 or 1.25."""
    workers = lj.Workers(1, 4)
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    loss, rate = np.array([3, 2, 1, 4], np.float32), np.float32([8, 4, 2, 1])

    def rates(exchange):
        tx = unequal.rates_travel(exchange)

        def train(x, loss, rate):
            state = optax.tree.set(tx.init(x), learning_rate=rate)
            step = lambda state, _: (tx.update(0 * x, state, x, value=loss)[1], None)
            state, _ = jax.lax.scan(step, state, length=unequal.PERIOD)
            return optax.tree.get(state, "learning_rate")

        return workers.map(train)(*workers.put((x, loss, rate))).tolist()

    assert rates(unequal.leader(1.0)) == [2, 2, 2, 2]
    *others, leader, last = rates(unequal.varied(unequal.leader(1.0)))
    factors = np.divide([*others, last], 2)
    assert leader == 2
    np.testing.assert_allclose(np.where(factors < 1, 0.8, 1.25), factors, rtol=1e-6)


# staleness.py


def test_a_table_with_a_row_per_method_and_a_figure(tmp_path, capsys):
    methods = ["lsgd", "decoupled-diloco"]
    options = "--seconds 4 --seeds 1 --rates 0.4 --error 50 --workers 4".split()
    asked = ["--methods", *methods, "--scenarios", "one straggler", "--out", str(tmp_path)]
    assert staleness.main([*options, *asked]) == 0
    title, _, _, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert title == "one straggler, 4 workers"
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[0] for row in cells] == methods
    assert all(float(row[2]) < 70 for row in cells)
    # In lock step all take as many steps as the slow worker; otherwise only it takes fewer.
    lock_step, decoupled = (float(row[-1]) for row in cells)
    assert lock_step < 40 and 78 < decoupled <= 84
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png"}


def test_failures_follow_the_seed_and_are_followed_by_returns():
    scenario = staleness.leaving_and_joining(8, 200.0, seed=0)
    assert scenario == staleness.leaving_and_joining(8, 200.0, seed=0)
    assert scenario != staleness.leaving_and_joining(8, 200.0, seed=1)
    (first, *_), (back, *_) = scenario.drops[0], scenario.joins[0]
    times = first - 0.01, first, back - 0.01, back
    assert [scenario.is_up(0, t) for t in times] == [True, False, False, True]


def test_steps_of_a_failed_worker_since_its_last_exchange_do_not_count(monkeypatch):
    """Worker 1 fails in its step 13 of a period of 8, and 4 of 12 steps are lost."""
    speeds = staleness.at.Speeds(staleness.STEP)
    fails = lambda *_: staleness.Scenario(speeds, {1: [1.25]})
    entry = staleness.METHODS["async-lsgd"]
    run = staleness.measure(entry, fails, workers=2, seconds=2.0, seed=0, rate=0.1)
    steps = 19 + 8  # the last step of worker 0 ends with the run
    assert np.isclose(run.goodput, 100 * steps / 40, atol=3)


# gpu.py


QUICK = ["--only", "memory", "processes"]
REST = ["--only", "workers", "pulls", "processes", "--processes", "2"]


def run_gpu(*options):
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu.py", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, parts",
    [
        (QUICK, ["memory"] * 2 + ["processes"]),
        (REST, ["workers"] * 3 + ["pulls"] * 3 + ["processes"] * 3),
    ],
    ids=["quick", "rest"],
)
def test_a_gpu_table_on_cpus(options, parts):
    done = run_gpu("--sizes", "small", *options)
    assert done.returncode == 0, done.stderr
    said, _, head, _, *rows = done.stdout.splitlines()
    assert "Backend cpu" in said and "small sizes" in said
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in rows] == parts and head.count("|") == 7
    for _, measured, value, _, other, ratio in rows:
        if measured.startswith("skipped"):
            continue
        assert float(value.split()[0]) > 0 and float(other.split()[0]) > 0
        assert float(ratio.split()[0]) > 0
    if options is QUICK:
        assert rows[-1][1].startswith("skipped")
        assert rows[-3][1] == "diloco: planned by the compiler, donated"
        # An anchor and a momentum, once for all workers.
        assert float(rows[-3][-1]) < 1 and float(rows[-2][-1]) == 2


def test_full_sizes_need_a_gpu():
    done = run_gpu()
    assert done.returncode == 1 and not done.stdout
    assert "error: no GPU was found, the backend is cpu" in done.stderr
