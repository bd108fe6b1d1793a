"""Every method reproduces its oracle, with any number of workers per device."""

import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import CASES_2026, in_turn, inputs_2026, mostly_slow, train, train_rows

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
        module = lj if name == "allreduce" else lj.robust
        return optax.chain(getattr(module, name)(**settings), base)
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


# By default those of methods that have no other oracle, and whose equations their own tests
# do not compute by hand, with a worker on each device, which compiles fastest.
QUICK = "slowmo diloco sgp_exponential pairwise_clock cge"
QUICK = [(name, 8) for name in QUICK.split()]
EACH = QUICK + in_turn([name for name in CASES if (name, 8) not in QUICK], (8, 1, 2, 4))


# `test_numbers_do_not_depend_on_the_devices` runs every method on others, too.
@pytest.mark.parametrize("name, devices", mostly_slow(EACH, fast=QUICK))
def test_oracle(name, devices):
    case = CASES[name]
    with np.load(FOLDER / f"{name}.npz") as file:
        oracle = dict(file)
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


# Methods of 2025 and 2026, on rows of 17 numbers


def grawa(strength, period, level):
    return lj.contrib.grawa(strength, period, level == "layer")


def edit(period, rate, momentum, alpha, level="model", **options):
    guard = lj.Guard(decay=alpha, layerwise=level == "layer", **options)
    return lj.diloco(period, optax.sgd(rate, momentum, nesterov=True), guard=guard)


def decoupled(period, tokens, steps, merge):
    weights = tuple(n * n / k for n, k in zip(tokens, steps))
    return lj.diloco(period, merge={"rda": "radial", "avg": "mean"}[merge], weights=weights)


def sparseloco(k, chunk, period, decay, rate, bins=None, aggregate="mean"):
    bits = None if bins is None else bins.bit_length() - 1
    options = k / chunk, chunk, bits, decay, aggregate
    return lj.contrib.sparse_diloco(period, rate, *options)


def noloco(groups, momentum, rate, gamma, period):
    W = sum(map(len, groups[0]))
    edges = [[(i, j) for g in round for i in g for j in g if i != j] for round in groups]
    graph = lj.topology.from_edges(edges, W) if W > 1 else lj.topology.matchings
    return lj.contrib.noloco(period, momentum, rate, gamma, graph)


BUILD = {f.__name__: f for f in (grawa, edit, decoupled, sparseloco, noloco)}
NEW = {n: case for n, case in CASES_2026.items() if case["method"] in (*BUILD, "desloc")}
ODD = ("sparseloco", "noloco", "desloc")
# By default an odd number of workers, and the harder one of two forms; the tests of grawa,
# of DES-LOC and of radial merges compute theirs by hand.
FAST = "sparseloco_2bit-3 noloco-3 edit_layer-3".split()


@pytest.mark.parametrize("name", mostly_slow(NEW, fast=FAST))
def test_oracle_on_rows(name):
    case = NEW[name]
    (kind, options), settings = case["base"], case["settings"]
    base = getattr(optax, kind)(options["lr"], *list(options.values())[1:])
    if case["method"] == "desloc":
        periods = dict(settings)
        tx = lj.contrib.desloc(base, periods.pop("params"), periods)
    else:
        tx = optax.chain(base, BUILD[case["method"]](**settings))
    start, gradients = inputs_2026(case)
    for t, i, factor in case.get("spikes", ()):
        gradients[t - 1, i] *= factor
    devices = 1 if case["workers"] % 2 else 8
    seen, _ = train_rows(tx, start, gradients, devices)
    rtol, atol = 0 if case["method"] in ODD else 1e-5, 2e-5 if kind == "adam" else 2e-6
    np.testing.assert_allclose(seen, case["params"], rtol, atol)
