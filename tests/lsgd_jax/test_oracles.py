"""Every method reproduces its oracle, on every way of laying workers over devices."""

import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj


FOLDER = pathlib.Path(__file__).parents[1] / "oracles"
CASES = json.loads((FOLDER / "index.json").read_text())


SETUP = ("method", "nodes", "locals", "steps", "lr")


def build(case):
    """The transformation of an oracle's settings."""
    count = case["nodes"] * case["locals"]
    settings = {key: value for key, value in case.items() if key not in SETUP}
    name, base = case["method"], optax.sgd(case["lr"])
    if name in ("allreduce", "cge", "coordinate_median"):
        return optax.chain(getattr(lj, name)(**settings), base)
    if name == "dpsgd_ring":
        name, settings = "dpsgd", {"topology": lj.topology.ring(count)}
    if name in ("sgp", "osgp"):
        settings["topology"] = lj.topology.exponential(count)
    if name == "slowmo":
        settings["learning_rate"] = case["lr"]
    if name == "diloco":
        rate, momentum = settings.pop("outer_lr"), settings.pop("outer_momentum")
        settings["outer"] = optax.sgd(rate, momentum=momentum, nesterov=True)
    return optax.chain(base, getattr(lj, name)(**settings))


# Each on one number of devices by default, which takes turns, and on all others if slow.
LAYOUTS = [
    pytest.param(name, devices, marks=[pytest.mark.slow] * ((i + k) % 4 != 0))
    for i, name in enumerate(CASES)
    for k, devices in enumerate((8, 4, 2, 1))
]


@pytest.mark.parametrize("name, devices", LAYOUTS)
def test_oracle(name, devices):
    case, oracle = CASES[name], np.load(FOLDER / f"{name}.npz")
    count = case["nodes"] * case["locals"]
    workers = lj.Workers(
        case["nodes"], case["locals"], devices=jax.devices()[: min(devices, count)]
    )
    tx = build(case)

    def train_step(params, state, grads, loss):
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    tree = lambda prefix, i=...: {
        k: jnp.asarray(oracle[f"{prefix}_{k}"][i], jnp.float32) for k in ("w", "b")
    }
    params = workers.put(tree("x0"))
    state = workers.map(tx.init)(params)
    step = workers.map(train_step, donate=(0, 1))
    for t in range(case["steps"]):
        loss = workers.put(jnp.asarray(oracle["losses"][t], jnp.float32))
        params, state = step(params, state, workers.put(tree("grads", t)), loss)
        chex.assert_trees_all_close(
            jax.device_get(params), tree("params", t), rtol=1e-5, atol=1e-6
        )
    assert step._cache_size() == 1
