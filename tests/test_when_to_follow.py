"""The benchmark of methods among workers that are not alike."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np


FILE = pathlib.Path(__file__).parents[1] / "benchmarks" / "when_to_follow.py"
SPEC = importlib.util.spec_from_file_location("when_to_follow", FILE)
assert SPEC is not None and SPEC.loader is not None
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)


def test_a_row_per_method_and_a_column_per_scenario(capsys):
    scenarios = ["equal workers", "learning rates"]
    options = ["--methods", "lsgd, λ = 1", "--seeds", "2", "--steps", "80"]
    assert benchmark.main([*options, "--scenarios", *scenarios]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.split(" | ")[1:] == [scenarios[0], f"{scenarios[1]} |"]
    name, *errors = row.strip("| ").split(" | ")
    assert name == "lsgd, λ = 1"
    assert all(float(error.split(" ± ")[0]) < 25 for error in errors)


def test_scenarios_change_only_what_they_name():
    labels = np.arange(1440) % 10
    equal = benchmark.equal_workers(labels, 0)
    changed = {
        name: {
            field
            for field, before, after in zip(equal._fields, equal, make(labels, 0))
            if not np.array_equal(before, after)
        }
        for name, make in benchmark.SCENARIOS.items()
    }
    assert changed == {
        "equal workers": set(),
        "learning rates": {"rate"},
        "corrupted labels": {"labels"},
        "flipped bits": {"faults"},
        "classes apart": {"rows"},
    }
    rows = benchmark.classes_apart(labels, 0).rows
    assert max(len(np.unique(labels[each])) for each in rows) <= 3


def test_a_fault_flips_one_bit():
    tree = {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}
    broken = benchmark.with_fault(tree, jax.random.key(0), 1.0)
    unlike = [(x != y).sum() for x, y in zip(*map(jax.tree.leaves, (tree, broken)))]
    assert sum(unlike) == 1
    sound = benchmark.with_fault(tree, jax.random.key(0), 0.0)
    assert jax.tree.all(jax.tree.map(np.array_equal, tree, sound))
