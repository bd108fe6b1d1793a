"""The public names that have moved, and the types of all."""

import dataclasses
import operator
import pathlib
import subprocess
import sys
import types

import pytest
from outside import ROOT

import lsgd_jax as lj


@pytest.mark.parametrize(
    "name",
    ["rules.leader", "rules.Group", "layouts.following", "robust.krum", "contrib.gosgd"],
)
def test_old_names_work_with_a_warning(name):
    module, _, old = name.partition(".")
    with pytest.warns(DeprecationWarning, match=f"lsgd_jax.{old} is lsgd_jax.{name} now"):
        found = getattr(lj, old)
    assert found is getattr(getattr(lj, module), old)
    with pytest.raises(AttributeError, match=f"no attribute '{old}s'"):
        getattr(lj, f"{old}s")


@pytest.mark.parametrize(
    "module, old, new",
    [
        ("asynchronous", "Report", "WorkerReport"),
        ("asynchronous.ray_engine", "Options", "ClusterOptions"),
    ],
)
def test_renamed_classes_work_with_a_warning(module, old, new):
    found = operator.attrgetter(module)(lj)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is {new} now"):
        assert getattr(found, old) is getattr(found, new)
    with pytest.raises(AttributeError, match=f"no attribute '{old}s'"):
        getattr(found, f"{old}s")


def test_a_renamed_argument_works_with_a_warning():
    group = lj.rules.Group("local")
    with pytest.warns(DeprecationWarning, match="`turn` is `number` now"):
        assert group.quantization_error(1.0, turn=2) is None
    assert group.quantization_error(1.0, number=2) is None
    rule = lj.rules.average()
    with pytest.warns(DeprecationWarning, match="`turns` is `rounds` now"):
        other = dataclasses.replace(rule, turns=lambda size: (0, 1))
    assert other.rounds(2) == (0, 1)


def test_modules_show_public_names_alone():
    hidden = {"_src", "_moved"}  # and those that every module has
    for module in lj, lj.rules, lj.layouts, lj.robust, lj.contrib, lj.topology, lj.checks:
        for name in {x for x in dir(module) if not x.startswith("__")} - hidden:
            value = getattr(module, name)
            home = getattr(value, "__module__", "lsgd_jax")  # modules have none
            assert home.startswith(("lsgd_jax", "typing", "types", "collections")), name
            assert not isinstance(value, types.ModuleType) or "lsgd_jax" in value.__name__


RIGHT = """
import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

import lsgd_jax as lj

outer: lj.Exchange = lj.diloco(4, wire="int8", part=["head"])
tx = optax.chain(optax.sgd(0.1), lj.exchange(lj.Pull(lj.rules.average(), 0.5), outer))
workers = lj.Workers(nodes=2, locals=2)
params = workers.put({"head": jnp.ones((4, 3))})
model = lj.center(params, workers.map(tx.init)(params))
due: bool = outer.is_due(4)
speeds = lj.asynchronous.simulator.run
"""
WRONG = {
    'lj.diloco("4")': 'incompatible type "str"; expected "int | Periods',
    'lj.diloco(4, wire="int9")': 'expected "Wire | TopK | Literal',
    "workers.foo()": '"Workers" has no attribute "foo"',
    "lj.rules.average().is_due(1)": '"Rule" has no attribute "is_due"',
    "lj.asynchronous.simulator.foo": "has no attribute",
    "lj.asynchronous.ray_engine.foo": "has no attribute",
}


@pytest.mark.slow
def test_mypy_strict_accepts_a_right_program_and_finds_wrong_calls(tmp_path):
    package = pathlib.Path(lj.__file__).parent  # in this checkout, or an installed wheel
    assert (package / "py.typed").exists()
    path = {"MYPYPATH": str(ROOT)} if package.parent == ROOT else {}
    program = tmp_path / "program.py"
    program.write_text(RIGHT + "\n".join(WRONG))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
        + ["--no-error-summary", "--cache-dir", tmp_path / "cache", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**path, "PATH": ""},
        timeout=300,
    )
    lines = done.stdout.splitlines()
    first = len(RIGHT.splitlines()) + 1
    errors = [line for line in lines if ": error: " in line]
    for i, (call, message) in enumerate(WRONG.items()):
        assert any(f":{first + i}: " in e and message in e for e in errors), (call, lines)
    assert len(errors) == len(WRONG), done.stdout + done.stderr
