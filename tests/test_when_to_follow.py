"""The benchmark of methods among workers that are not alike."""

import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj


FILE = pathlib.Path(__file__).parents[1] / "benchmarks" / "when_to_follow.py"
SPEC = importlib.util.spec_from_file_location("when_to_follow", FILE)
assert SPEC is not None and SPEC.loader is not None
sys.path.append(str(FILE.parent))  # it imports its neighbor `usage`
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)


def test_a_row_per_method_and_a_column_per_scenario(capsys, tmp_path):
    scenarios, seeds = ["equal workers", "adversary"], 2
    options = ["--seeds", str(seeds), "--steps", "80", "--scenarios", *scenarios]
    files = ["--json", str(tmp_path / "all.json"), "--figure", str(tmp_path / "all.png")]
    methods = ["--methods", "leader", "leader, judged by peers"]
    assert benchmark.main([*methods, *options, *files]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split(" | ")[1:] == [scenarios[0], f"{scenarios[1]} |"]
    names, equal, lied = zip(*(row.strip("| ").split(" | ") for row in rows))
    assert names == ("leader", "leader, judged by peers")
    # An adversary that leads leaves a random network.
    assert [float(cell.split(" ± ")[0]) < 25 for cell in equal + lied] == [1, 1, 0, 1]
    numbers = json.loads((tmp_path / "all.json").read_text())
    of_adversary = numbers["leader"]["adversary"]
    assert [len(of_adversary[k]) for k in ("center", "best worker")] == [seeds] * 2
    assert (tmp_path / "all.png").stat().st_size > 1000


def test_a_text_of_its_own(capsys, tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 100)
    options = ["--seeds", "1", "--steps", "80", "--scenarios", "data apart"]
    task = ["--task", "text", "--files", str(tmp_path / "text")]
    assert benchmark.main([*task, *options, "--methods", "mean (local SGD)"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert float(row.strip("| ").split(" | ")[1]) < 1.5  # of log 15 = 2.7


@pytest.mark.slow
def test_cnn7_on_a_device_per_worker(monkeypatch):
    """Each worker takes its own steps; the last of them ends at an exchange."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (64, 32, 32, 3), np.uint8)
    made = benchmark.Images(images, (np.arange(64) % 10).astype(np.uint8))
    both = benchmark.cifar10.Dataset(made, made, 10)
    monkeypatch.setattr(benchmark.cifar10, "load", lambda *given, **named: both)
    task = benchmark.cnn7_task("")
    train = benchmark.trainer(task, benchmark.default_methods(8)["leader"], steps=8)
    params, center, rates = train(benchmark.equal_workers(task, 0), 0)
    start = task.start(jax.random.key(0))
    for x, one, old in zip(*map(jax.tree.leaves, (params, center, start))):
        np.testing.assert_allclose(x, np.stack([one] * 8), rtol=1e-5, atol=1e-7)
        assert (one != old).any()
    assert 0 < benchmark.tester(task)(center) <= 100
    np.testing.assert_allclose(rates, 0.05)


def test_missing_data_end_it_with_one_line(capsys):
    for options in (["text", "--files", "no/such/file"], ["cifar10", "--cifar", "nowhere"]):
        with pytest.raises(SystemExit) as ended:
            benchmark.main(["--task", *options])
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_scenarios_change_only_what_they_name():
    labels, inputs = np.arange(1440) % 10, np.zeros((1440, 1), np.float32)
    order = np.argsort(labels, kind="stable")
    given: tuple = (inputs, labels, inputs, labels, 10, order, 0.1, "loss in nats")
    task = benchmark.Task(*given, start=None, logits=None)
    equal = benchmark.equal_workers(task, 0)
    changed = {
        name: {
            field
            for field, before, after in zip(equal._fields, equal, make(task, 0))
            if not np.array_equal(before, after)
        }
        for name, make in benchmark.SCENARIOS.items()
    }
    assert changed == {
        "equal workers": set(),
        "learning rates": {"rate"},
        "corrupted labels": {"labels"},
        "flipped bits": {"faults"},
        "data apart": {"rows"},
        "adversary": {"lies", "rate"},
    }
    rows = benchmark.data_apart(task, 0).rows
    assert max(len(np.unique(labels[each])) for each in rows) <= 3


def test_a_fault_flips_one_bit():
    tree = {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}
    broken = benchmark.with_fault(tree, jax.random.key(0), 1.0)
    unlike = [(x != y).sum() for x, y in zip(*map(jax.tree.leaves, (tree, broken)))]
    assert sum(unlike) == 1
    sound = benchmark.with_fault(tree, jax.random.key(0), 0.0)
    assert jax.tree.all(jax.tree.map(np.array_equal, tree, sound))


def test_rates_travel_from_the_leader_and_vary():
    """The leader keeps its rate; each other worker takes it times 1, or 0.8 or 1.25."""
    workers = lj.Workers(1, 4)
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    loss, rate = np.array([3, 2, 1, 4], np.float32), np.float32([8, 4, 2, 1])

    def rates(exchange):
        tx = benchmark.rates_travel(exchange)

        def train(x, loss, rate):
            state = optax.tree.set(tx.init(x), learning_rate=rate)
            step = lambda state, _: (tx.update(0 * x, state, x, value=loss)[1], None)
            state, _ = jax.lax.scan(step, state, length=benchmark.PERIOD)
            return optax.tree.get(state, "learning_rate")

        return workers.map(train)(*workers.put((x, loss, rate))).tolist()

    assert rates(benchmark.leader(1.0)) == [2, 2, 2, 2]
    *others, leader, last = rates(benchmark.varied(benchmark.leader(1.0)))
    factors = np.divide([*others, last], 2)
    assert leader == 2
    np.testing.assert_allclose(np.where(factors < 1, 0.8, 1.25), factors, rtol=1e-6)
