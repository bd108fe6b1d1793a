"""Methods that weigh workers: GRAWA, EDiT's guard, and the merge of Decoupled DiLoCo."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj


FILE = pathlib.Path(__file__).parents[1] / "oracles" / "methods_2026.json"
ORACLES = json.loads(FILE.read_text())
CASES = {
    f"{case['name']}-{case['workers']}": case
    for case in ORACLES["cases"]
    if case["method"] in ("grawa", "edit", "decoupled")
}


def method_of(case):
    settings = dict(case["settings"])
    period = settings.pop("period")
    if case["method"] == "grawa":
        layerwise = settings.pop("level") == "layer"
        return lj.grawa(settings.pop("strength"), period, layerwise, **settings)
    outer = optax.sgd(settings.pop("rate", 0.7), settings.pop("momentum", 0.9), True)
    if case["method"] == "edit":
        layerwise = settings.pop("level", "model") == "layer"
        decay = settings.pop("alpha")
        guard = lj.Guard(decay=decay, layerwise=layerwise, **settings)
        return lj.diloco(period, outer, guard=guard)
    tokens, steps = settings.pop("tokens"), settings.pop("steps")
    weights = tuple(n * n / k for n, k in zip(tokens, steps))
    merge = {"rda": "radial", "avg": "mean"}[settings.pop("merge")]
    return lj.diloco(period, outer, merge=merge, weights=weights)


def tree(rows):
    rows = jnp.asarray(rows, jnp.float32)
    return {"a": rows[:, :12].reshape(-1, 3, 4), "b": rows[:, 12:]}


def run(tx, start, gradients, devices, **given):
    """The workers' parameters after each step: [steps, W, 17]; and the last state."""
    W = len(start)
    workers = lj.Workers(1, W, devices=jax.devices()[: min(W, devices)])

    def step(params, state, grads):
        more = {name: grads for name in given}
        updates, state = tx.update(grads, state, params, value=jnp.float32(1), **more)
        return lj.apply_updates(params, updates), state

    params, seen = workers.put(tree(start)), []
    state, step = workers.map(tx.init)(params), workers.map(step)
    for grads in gradients:
        params, state = step(params, state, workers.put(tree(grads)))
        a, b = (np.asarray(params[k]).reshape(W, -1) for k in "ab")
        seen.append(np.concatenate([a, b], axis=1))
    assert step._cache_size() == 1
    return np.stack(seen), state


def inputs(case):
    given = ORACLES["inputs"][str(case["workers"])]
    gradients = np.array(given["gradients"])
    for t, i, factor in case["spikes"]:
        gradients[t - 1, i] *= factor
    return np.tile(given["start"], (case["workers"], 1)), gradients


@pytest.mark.parametrize("name", CASES)
def test_oracle(name):
    case = CASES[name]
    start, gradients = inputs(case)
    tx = optax.chain(optax.sgd(case["base"][1]["lr"]), method_of(case))
    seen, _ = run(tx, start, gradients, devices=1 if case["workers"] % 2 else 8)
    np.testing.assert_allclose(seen, case["params"], rtol=1e-5, atol=2e-6)
