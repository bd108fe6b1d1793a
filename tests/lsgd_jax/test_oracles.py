"""Every method reproduces its oracle, with any number of workers per device."""

import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mostly_slow, train

import lsgd_jax as lj


FOLDER = pathlib.Path(__file__).parents[1] / "oracles"
CASES = json.loads((FOLDER / "index.json").read_text())


SETUP = ("method", "nodes", "locals", "steps", "lr")


def build(case):
    """Returns the transformation for the settings of an oracle."""
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


DEVICES = (8, 4, 2, 1)


@pytest.mark.parametrize(
    "name, devices",
    mostly_slow(
        [(name, devices) for name in CASES for devices in DEVICES],
        # By default each oracle runs on one number of devices, and the numbers take turns.
        fast=[(name, DEVICES[-i % 4]) for i, name in enumerate(CASES)],
    ),
)
def test_oracle(name, devices):
    case, oracle = CASES[name], np.load(FOLDER / f"{name}.npz")
    count = case["nodes"] * case["locals"]
    workers = lj.Workers(
        case["nodes"], case["locals"], devices=jax.devices()[: min(devices, count)]
    )
    tree = lambda prefix, i=...: {
        k: jnp.asarray(oracle[f"{prefix}_{k}"][i], jnp.float32) for k in ("w", "b")
    }
    steps = range(case["steps"])
    grads = [tree("grads", t) for t in steps]
    losses = oracle["losses"][: len(steps)]
    seen, _ = train(build(case), workers, tree("x0"), grads, losses, optax.apply_updates)
    expected = [tree("params", t) for t in steps]
    chex.assert_trees_all_close(seen, jax.device_get(expected), rtol=1e-5, atol=1e-6)
