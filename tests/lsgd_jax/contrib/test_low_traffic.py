"""SparseLoCo, DES-LOC, NoLoCo and SPARTA: their oracles, and what each promises."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Run

import lsgd_jax as lj
from lsgd_jax._src.wire.top_k import quantize


ORACLES = json.loads(
    (pathlib.Path(__file__).parents[2] / "oracles/methods_2026.json").read_text()
)


def sparseloco(base, k, chunk, period, decay, rate, bins=None, aggregate="mean"):
    bits = None if bins is None else bins.bit_length() - 1
    return optax.chain(
        base,
        lj.contrib.sparse_diloco(period, rate, k / chunk, chunk, bits, decay, aggregate),
    )


def noloco(base, groups, momentum, rate, gamma, period):
    W = sum(map(len, groups[0]))
    edges = [[(i, j) for g in round for i in g for j in g if i != j] for round in groups]
    graph = lj.topology.from_edges(edges, W) if W > 1 else lj.topology.matchings
    return optax.chain(base, lj.contrib.noloco(period, momentum, rate, gamma, graph))


def desloc(base, params, **moments):
    return lj.contrib.desloc(base, params, moments)


BUILD = {"sparseloco": sparseloco, "noloco": noloco, "desloc": desloc}
# By default a worker alone and an odd number of workers.
CASES = [
    pytest.param(
        case,
        id=f"{case['name']}-{case['workers']}",
        marks=[pytest.mark.slow] * (case["workers"] % 2 == 0),
    )
    for case in ORACLES["cases"]
    if case["method"] in BUILD
]


def trees(flat):
    """Rows of 17 numbers as leaves "a" [..., 3, 4] and "b" [..., 5]."""
    flat = np.asarray(flat)
    return {"a": flat[..., :12].reshape(*flat.shape[:-1], 3, 4), "b": flat[..., 12:]}


def flat_rows(tree):
    rows = [np.asarray(tree[k]).reshape(len(tree[k]), -1) for k in ("a", "b")]
    return np.concatenate(rows, axis=1)


@pytest.mark.parametrize("case", CASES)
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


def test_desloc_averages_the_moments_of_its_part_whatever_the_base():
    """Adam, and SGD with momentum. Leaf "b" and its moments stay with their worker."""
    x = {"a": np.ones((2, 3), np.float32), "b": np.ones((2, 4), np.float32)}
    apart = jax.tree.map(lambda x: x * np.array([[1], [3]], np.float32), x)
    for base, periods in (
        (optax.adam(0.1), [2, 6, 12]),
        (optax.sgd(0.1, momentum=0.9), [2, 6]),
    ):
        tx, workers = lj.contrib.desloc(base, period=2, part=["a"]), lj.Workers(1, 2)
        step = workers.map(lambda g, s, x, tx=tx: tx.update(g, s, x))
        state = workers.map(tx.init)(x)
        for _ in range(12):
            u, state = step(workers.put(apart), state, workers.put(x))
        levels = lj.diagnostics(state)
        assert [level.period for level in levels] == periods
        assert {level.payload for level in levels} == {4 * 3 + 4}
        first = optax.tree.get(state, "mu" if len(periods) == 3 else "trace")
        equal = jax.tree.map(lambda m: bool(np.allclose(m[0], m[1])), first)
        assert equal == {"a": True, "b": False}
        assert np.allclose(u["a"][0], u["a"][1])
    with pytest.raises(ValueError, match="has none of 'mu', 'trace', 'nu'"):
        lj.contrib.desloc(optax.sgd(0.1)).init(x)
    with pytest.raises(ValueError, match=r"`moments\['mu'\]` must be a positive int"):
        lj.contrib.desloc(optax.adam(0.1), moments={"mu": 0})


def test_top_k_is_refused_where_parameters_travel_whole():
    with pytest.warns(DeprecationWarning, match=r"is lj.TopK\(...\) now"):
        wire = lj.Wire("top-k", chunk=64)
    assert wire == lj.TopK(chunk=64)
    for make in (lj.lsgd, lj.local_sgd, lj.dpsgd, lj.contrib.noloco, lj.wagma):
        with pytest.raises(ValueError, match="`wire` may be 'top-k' only for a rule"):
            make(wire=wire)
    for options, match in (
        (dict(density=0.0), "`density` must be above 0"),
        (dict(bits=9), "`bits` must be at most 8, got bits=9"),
        (dict(aggregate="sum"), "`aggregate` must be one of 'mean', 'senders'"),
    ):
        with pytest.raises(ValueError, match=match):
            lj.TopK(**options)


def test_a_worker_that_is_not_finite_sends_nothing_and_keeps_no_error():
    """It takes the anchor, which the others' messages alone have moved; |H| is theirs."""
    tx = lj.contrib.sparse_diloco(1, density=0.25, chunk=4, bits=None)
    workers, start = lj.Workers(1, 3), np.zeros((3, 8), np.float32)
    u = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    step = workers.map(lambda u, s, x, v: tx.update(u, s, x, value=v))
    x, state = workers.put(start), workers.map(tx.init)(start)
    losses = workers.put(np.array([0, np.nan, 0], np.float32))
    moved, state = workers.fetch(step(workers.put(u), state, x, losses))
    sent = np.zeros_like(u)
    for i in (0, 2):
        for chunk in (slice(0, 4), slice(4, 8)):
            k = chunk.start + np.abs(u[i, chunk]).argmax()
            sent[i, k] = u[i, k]
    np.testing.assert_allclose(moved, np.tile(sent.sum(axis=0) / 2, (3, 1)), rtol=1e-6)
    error = state.pulls[0].wire.error
    np.testing.assert_allclose(error, np.where([[1], [0], [1]], u - sent, 0), rtol=1e-6)


def test_sparta_averages_one_entry_of_every_cell_and_restores_by_the_step_before():
    tx, workers = lj.contrib.sparta(density=0.25, seed=3), lj.Workers(1, 4)
    rng = np.random.default_rng(0)
    x = {"w": rng.normal(size=(4, 3, 7)), "b": rng.normal(size=(4, 2))}
    x = jax.tree.map(jnp.float32, x)
    zero = jax.tree.map(jnp.zeros_like, x)
    step = workers.map(lambda u, s, x, v: tx.update(u, s, x, value=v))
    state, often = workers.map(tx.init)(x), np.zeros(21)
    for _ in range(200):
        u, state = step(workers.put(zero), state, workers.put(x), workers.put(np.ones(4)))
        moved = np.asarray(u["w"]).reshape(4, -1) != 0
        assert (moved == moved[:1]).all()
        # Cells of four, the last one of a single entry, which is drawn now and then.
        per_cell = [moved[0, k : k + 4].sum() for k in range(0, 21, 4)]
        assert per_cell[:5] == [1] * 5 and per_cell[5] <= 1
        mean = np.asarray(x["w"] + u["w"]).reshape(4, -1)[:, moved[0]]
        expected = np.asarray(x["w"]).reshape(4, -1)[:, moved[0]].mean(axis=0)
        np.testing.assert_allclose(mean, np.tile(expected, (4, 1)), rtol=1e-5, atol=1e-6)
        often += moved[0]
    # 200 draws of probability 1/4 each: within 4.5 standard deviations.
    assert np.abs(often - 50).max() < 4.5 * np.sqrt(200 * 0.25 * 0.75)
    assert lj.diagnostics(state)[0].payload == 4 * (6 + 1) + 4


def test_noloco_keeps_the_slow_weights_together_if_gamma_pulls():
    """With another gradient for each worker; γ = 0 averages what is new, and no more."""

    def spread(gamma):
        graph = lj.topology.matchings(4, rounds=6, seed=1)
        tx, workers = lj.contrib.noloco(1, gamma=gamma, topology=graph), lj.Workers(1, 4)
        rng, x = np.random.default_rng(0), workers.put(np.zeros((4, 5), np.float32))
        state = workers.map(tx.init)(x)

        def step(u, state, x):
            u, state = tx.update(u, state, x)
            return lj.apply_updates(x, u), state

        step = workers.map(step)
        for _ in range(60):
            u = rng.normal(size=(4, 5)).astype(np.float32)
            x, state = step(workers.put(u), state, x)
        return float(lj.consensus_distance(x))

    assert spread(0.7) < 0.4 * spread(0.0)


RESUMED = {
    "sparse_diloco": lambda: lj.contrib.sparse_diloco(4, 0.7, 0.5, 4, fragments=2, delay=1),
    "noloco": lambda: lj.contrib.noloco(
        4, topology=lj.topology.matchings(4, 2), fragments=2
    ),
    "sparta": lambda: lj.contrib.sparta(0.3),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_bit_identical_from_what_was_saved(name):
    """In fragments and with a delay; errors, slow weights and draws go along."""
    run = Run(optax.chain(optax.sgd(0.1), RESUMED[name]()), 2, 2, 2)
    seen, last = run.train()
    params = run.workers.put(run.start)
    state = run.init(params)
    for t, batch in enumerate(run.batches):
        if t == 5:
            saved = run.workers.fetch((params, state))
            params, state = run.workers.put(saved)
        params, state = run.compiled(params, state, run.workers.put(batch))
        jax.tree.map(np.testing.assert_array_equal, run.workers.fetch(params), seen[t])
    fetched = map(run.workers.fetch, (state, last))
    jax.tree.map(np.testing.assert_array_equal, *fetched)
