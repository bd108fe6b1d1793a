"""SparseLoCo, DES-LOC, NoLoCo and SPARTA: their oracles, and what each promises."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj
from lsgd_jax._src.top_k import quantize


ORACLES = json.loads(
    (pathlib.Path(__file__).parents[1] / "oracles/methods_2026.json").read_text()
)


def sparseloco(base, k, chunk, period, decay, rate, bins=None, aggregate="mean"):
    bits = None if bins is None else bins.bit_length() - 1
    return optax.chain(
        base, lj.sparse_diloco(period, rate, k / chunk, chunk, bits, decay, aggregate)
    )


def noloco(base, groups, momentum, rate, gamma, period):
    W = sum(map(len, groups[0]))
    edges = [[(i, j) for g in round for i in g for j in g if i != j] for round in groups]
    graph = lj.topology.from_edges(edges, W) if W > 1 else lj.topology.matchings
    return optax.chain(base, lj.noloco(period, momentum, rate, gamma, graph))


def desloc(base, params, **moments):
    return lj.desloc(base, params, moments)


BUILD = {"sparseloco": sparseloco, "noloco": noloco, "desloc": desloc}
CASES = [case for case in ORACLES["cases"] if case["method"] in BUILD]


def trees(flat):
    """Rows of 17 numbers as leaves "a" [..., 3, 4] and "b" [..., 5]."""
    flat = np.asarray(flat)
    return {"a": flat[..., :12].reshape(*flat.shape[:-1], 3, 4), "b": flat[..., 12:]}


def flat_rows(tree):
    rows = [np.asarray(tree[k]).reshape(len(tree[k]), -1) for k in ("a", "b")]
    return np.concatenate(rows, axis=1)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['name']}-{c['workers']}")
def test_oracle(case):
    (name, base), W = case["base"], case["workers"]
    rate = base.pop("lr") if "lr" in base else 0.1
    tx = BUILD[case["method"]](getattr(optax, name)(rate, **base), **case["settings"])
    inputs = ORACLES["inputs"][str(W)]
    path = path_of(tx, np.tile(inputs["start"], (W, 1)), np.array(inputs["gradients"]))
    atol = 2e-5 if name == "adam" else 2e-6
    np.testing.assert_allclose(path, case["params"], rtol=0, atol=atol)


def test_values_are_rounded_as_the_released_code_rounds_them():
    """It rounds a - y, and the wire y - a."""
    unit = ORACLES["units"]["statistical_quantizer"]
    codes, values = quantize(-jnp.array(unit["v"], jnp.float32), bits=2)
    assert codes.tolist() == unit["codes"]
    np.testing.assert_allclose(-values[codes], unit["decoded"], rtol=1e-5, atol=1e-6)


def path_of(tx, start, gradients):
    """The parameters [steps, W, 17] after each step with the given gradients."""
    W = len(start)
    workers = lj.Workers(1, W, devices=jax.devices()[: 1 if W == 3 else W])
    params = workers.put(jax.tree.map(jnp.float32, trees(start)))

    def train_step(params, state, grads):
        updates, state = tx.update(grads, state, params, value=0.0)
        return lj.apply_updates(params, updates), state

    state, seen = workers.map(tx.init)(params), []
    step = workers.map(train_step)
    for each in gradients:
        grads = workers.put(jax.tree.map(jnp.float32, trees(each)))
        params, state = step(params, state, grads)
        seen.append(flat_rows(workers.fetch(params)))
    assert step._cache_size() == 1
    return np.array(seen)
