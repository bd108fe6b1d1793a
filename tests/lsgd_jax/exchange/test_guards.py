"""The claims of docs/faults.md about the outcome of each fault with each guard."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lsgd_jax as lj


PAGE = pathlib.Path(__file__).parents[3] / "docs" / "faults.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")

W, BAD, AT, PERIOD, STEPS = 4, 1, 6, 4, 24
SGD = optax.sgd(0.1, momentum=0.5)
GUARDED = optax.apply_if_finite(SGD, 100)
GUARDS = {
    "no guard": (SGD, "due", optax.apply_updates),
    "`apply_if_finite`": (GUARDED, "due", optax.apply_updates),
    "`lj.apply_updates`": (SGD, "due", lj.apply_updates),
    '`check="every_step"`': (SGD, "every_step", optax.apply_updates),
    "both guards": (GUARDED, "due", lj.apply_updates),
}
# Outcomes of one half of "both guards", which the page leaves out: one worker, all workers.
ALONE = {
    "`apply_if_finite`": (
        ["trains on", "trains on", "trains on", "lost", "lost"],
        ["trains on", "trains on", "trains on", "lost", "lost"],
    ),
    "`lj.apply_updates`": (
        ["trains on", "follows", "follows", "follows", "follows"],
        ["trains on", "lost", "lost", "lost", "lost"],
    ),
}
# The values that are not finite on the step of the fault.
FAULTS = {
    "loss": ["loss"],
    "gradient, with a finite loss": ["gradient"],
    "loss and gradient": ["loss", "gradient"],
    "parameters": ["parameters"],
    "momentum": ["momentum"],
}


def promised():
    """Returns the outcomes of the page and of ALONE: {(workers, fault, guard): outcome}."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|") and not line.startswith("| ---")
    ]
    (_, *guards), *rows = [row for row in rows if len(row) == 1 + len(GUARDS) - len(ALONE)]
    cells = {
        (whose, fault, guard): x
        for guard, columns in ALONE.items()
        for whose, column in zip(("one worker", "all workers"), columns)
        for fault, x in zip(FAULTS, column)
    }
    for label, *outcomes in rows:
        whose, _, fault = label.partition(": ")
        cells |= {(whose, fault, guard): x for guard, x in zip(guards, outcomes)}
    return cells


@functools.cache
def trained(guard, exchange):
    """Returns (workers, init, run), compiled once; run takes faults of [W, STEPS] each."""
    base, check, apply = GUARDS[guard]
    tx = optax.chain(base, exchange(check))
    workers = lj.Workers(1, W, devices=jax.devices()[:1])

    def step(carry, faults):
        x, state, goal = carry
        x = x + faults["parameters"]
        inexact = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact)
        poison = lambda leaf: leaf + faults["momentum"] if inexact(leaf) else leaf
        state = (jax.tree.map(poison, state[0]), *state[1:])
        grads = x - goal + faults["gradient"]
        loss = ((x - goal) ** 2).sum() + faults["loss"]
        updates, state = tx.update(grads, state, x, value=loss)
        x = apply(x, updates)
        return (x, state, goal), jnp.isfinite(x).all()

    def run(x, state, goal, faults):
        (x, state, _), finite = lax.scan(step, (x, state, goal), faults)
        leaves = [y for y in jax.tree.leaves(state[0]) if y.shape == x.shape]
        momentum = functools.reduce(
            jnp.logical_and, [jnp.isfinite(y).all() for y in leaves]
        )
        return x, finite, momentum, state

    return workers, workers.map(tx.init), workers.map(run)


def outcomes(guard, fault, bad, value, exchange):
    """Returns the outcome for each worker."""
    workers, init, run = trained(guard, exchange)
    faults = {k: np.zeros((W, STEPS), np.float32) for f in FAULTS.values() for k in f}
    for kind in FAULTS[fault]:
        faults[kind][bad, AT - 1] = value
    x = workers.put(np.arange(W * 3, dtype=np.float32).reshape(W, 3) / 10)
    goals = workers.put(np.arange(W, dtype=np.float32)[:, None] * np.ones(3, np.float32))
    _, finite, momentum, state = run(x, init(x), goals, workers.put(faults))
    restored = sum(level.restored for level in lj.diagnostics(state))
    return list(map(outcome, *map(np.asarray, (finite, momentum, restored))))


def outcome(finite, momentum, restored):
    if not finite[-1]:
        return "lost"
    if momentum:
        return "trains on" if finite.all() else "recovers"
    return "follows" if restored > STEPS / PERIOD - 2 else "stands still"


local_sgd = lambda check: lj.local_sgd(PERIOD, check=check)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("guard", GUARDS)
def test_faults_have_the_documented_outcomes(guard, value):
    said, seen = promised(), {}
    for fault in FAULTS:
        one = outcomes(guard, fault, [BAD], value, local_sgd)
        assert [x for i, x in enumerate(one) if i != BAD] == ["trains on"] * (W - 1)
        seen["one worker", fault, guard] = one[BAD]
        (seen["all workers", fault, guard],) = set(
            outcomes(guard, fault, range(W), value, local_sgd)
        )
    assert seen == {key: x for key, x in said.items() if key[2] == guard}
    assert len(said) == 2 * len(FAULTS) * len(GUARDS)


@pytest.mark.slow
def test_a_method_with_a_center_restores_all_workers():
    guard = "both guards"
    diloco = lambda check: lj.diloco(PERIOD, check=check)
    assert set(outcomes(guard, "parameters", range(W), np.nan, diloco)) == {"recovers"}
