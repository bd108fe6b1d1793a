"""SparseLoCo, DES-LOC, NoLoCo and SPARTA: their oracles, and what each promises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import (
    CASES_2026,
    ORACLES_2026,
    Run,
    inputs_2026,
    mostly_slow,
    train,
    train_rows,
)

import lsgd_jax as lj
from lsgd_jax._src.wire.top_k import quantize


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
CASES = [name for name, case in CASES_2026.items() if case["method"] in BUILD]
# By default a worker alone and an odd number of workers.


@pytest.mark.parametrize(
    "name", mostly_slow(CASES, fast=[x for x in CASES if CASES_2026[x]["workers"] % 2])
)
def test_oracle(name):
    case = CASES_2026[name]
    (base, options), W = case["base"], case["workers"]
    settings = {"learning_rate": options["lr"], **options}
    del settings["lr"]
    tx = BUILD[case["method"]](getattr(optax, base)(**settings), **case["settings"])
    path, _ = train_rows(tx, *inputs_2026(case), devices=1 if W == 3 else W)
    atol = 2e-5 if base == "adam" else 2e-6
    np.testing.assert_allclose(path, case["params"], rtol=0, atol=atol)


def test_values_are_rounded_as_the_released_code_rounds_them():
    """It rounds a - y, and the wire y - a."""
    unit = ORACLES_2026["units"]["statistical_quantizer"]
    codes, values = quantize(-jnp.array(unit["v"], jnp.float32), bits=2)
    assert codes.tolist() == unit["codes"]
    np.testing.assert_allclose(-values[codes], unit["decoded"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "base, periods, moment",
    [
        (optax.adam(0.1), [2, 6, 12], "mu"),
        (optax.sgd(0.1, momentum=0.9), [2, 6], "trace"),
    ],
)
def test_desloc_averages_the_moments_of_its_part_whatever_the_base(base, periods, moment):
    """Leaf "b" and its moments stay with their worker."""
    x = {"a": np.ones((2, 3), np.float32), "b": np.ones((2, 4), np.float32)}
    apart = jax.tree.map(lambda x: x * np.array([[1], [-3]], np.float32), x)
    tx = lj.contrib.desloc(base, period=2, part=["a"])
    seen, state = train(tx, lj.Workers(1, 2), x, [apart] * 12)
    levels = lj.diagnostics(state)
    assert [level.period for level in levels] == periods
    assert {level.payload for level in levels} == {4 * 3 + 4}
    for tree in (seen[-1], optax.tree.get(state, moment)):
        equal = jax.tree.map(lambda x: bool(np.allclose(x[0], x[1])), tree)
        assert equal == {"a": True, "b": False}


def test_moments_of_desloc_are_checked():
    with pytest.raises(ValueError, match="has none of 'mu', 'trace', 'nu'"):
        lj.contrib.desloc(optax.sgd(0.1)).init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"`moments\['mu'\]` must be a positive int"):
        lj.contrib.desloc(optax.adam(0.1), moments={"mu": 0})


def test_top_k_is_refused_where_parameters_travel_whole():
    with pytest.warns(DeprecationWarning, match=r"is lj.TopK\(...\) now"):
        wire = lj.Wire("top-k", chunk=64)
    assert wire == lj.TopK(chunk=64)
    for make in (lj.lsgd, lj.local_sgd, lj.dpsgd, lj.contrib.noloco, lj.wagma):
        with pytest.raises(ValueError, match="`wire` may be 'top-k' only for a rule"):
            make(wire=wire)


def test_a_worker_that_is_not_finite_sends_nothing_and_keeps_no_error():
    """It takes the anchor, which the others' messages alone have moved; |H| is theirs."""
    tx = lj.contrib.sparse_diloco(1, density=0.25, chunk=4, bits=None)
    u = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    (moved,), state = train(tx, lj.Workers(1, 3), 0 * u, [u], [[0, np.nan, 0]])
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
        tx = lj.contrib.noloco(1, gamma=gamma, topology=graph)
        u = np.random.default_rng(0).normal(size=(60, 4, 5)).astype(np.float32)
        seen, _ = train(tx, lj.Workers(1, 4), 0 * u[0], u)
        return float(lj.consensus_distance(seen[-1]))

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
