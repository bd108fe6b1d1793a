"""Robust means, as aggregates of gradients and as targets of a pull."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lsgd_jax as lj
from lsgd_jax._src.wire import packing


FILE = pathlib.Path(__file__).parents[2] / "oracles" / "methods_2026.json"
ORACLE = json.loads(FILE.read_text())["units"]["robust"]
ROWS = np.array(ORACLE["rows"])

KINDS = {
    "trimmed_mean": (lj.trimmed_mean, {"cut": 2}),
    "krum": (lj.krum, {"faulty": 1}),
    "geometric_median": (lj.geometric_median, {}),
}


def tree(rows):
    """Two leaves, the second one of one element."""
    rows = jnp.asarray(rows, jnp.float32)
    return {"a": rows[:, :3], "b": rows[:, 3:]}


def aggregated(tx, rows, devices=1):
    """The aggregate that each worker gets of the rows: [W, 4]."""
    workers = lj.Workers(1, len(rows), devices=jax.devices()[:devices])
    seen = workers.map(lambda g: tx.update(g, tx.init(g), g)[0])(workers.put(tree(rows)))
    return np.concatenate([seen["a"], seen["b"]], axis=1)


def pulled(rule, rows):
    """Where a pull to the rule takes each worker whole: [W, 4]."""
    method, workers = lj.exchange(lj.Pull(rule, 1.0)), lj.Workers(1, len(rows))

    def step(x):
        still = jax.tree.map(jnp.zeros_like, x)
        return lj.apply_updates(x, method.update(still, method.init(x), x)[0])

    seen = workers.map(step)(workers.put(tree(rows)))
    return np.concatenate([seen["a"], seen["b"]], axis=1)


def expected(kind):
    if kind == "krum":
        return ROWS[ORACLE["krum_1"]]
    return ORACLE["trimmed_mean_2" if kind == "trimmed_mean" else kind]


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_of_both_forms(kind):
    make, options = KINDS[kind]
    of_gradients = aggregated(make(**options), ROWS, devices=7)
    target = pulled(lj.robust_mean(kind, **options), ROWS)
    for seen in (of_gradients, target):
        np.testing.assert_allclose(seen, np.tile(expected(kind), (7, 1)), atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_are_not_finite_are_dropped_first(kind):
    make, options = KINDS[kind]
    sick = np.concatenate([ROWS[:2], [[np.nan, 1, 1, 1]], ROWS[2:], [[1, 1, 1, np.inf]]])
    seen = aggregated(make(**options), sick)
    np.testing.assert_allclose(seen, np.tile(expected(kind), (9, 1)), atol=2e-6)
    nothing = aggregated(make(**options), np.full((3, 4), np.nan))
    assert np.isnan(nothing).all()


@pytest.mark.parametrize("tx", [lj.krum(faulty=3), lj.trimmed_mean(cut=4)])
def test_the_median_stands_in_for_what_needs_more_workers(tx):
    np.testing.assert_allclose(aggregated(tx, ROWS), np.tile(np.median(ROWS, 0), (7, 1)))


def test_multi_krum_is_the_mean_of_the_best():
    gaps = np.square(ROWS[:, None] - ROWS).sum(-1)
    scores = np.sort(gaps, axis=1)[:, 1:-2].sum(axis=1)  # without itself and f + 1 others
    best = ROWS[np.argsort(scores)[:3]].mean(axis=0)
    seen = aggregated(lj.krum(faulty=1, keep=3), ROWS)
    np.testing.assert_allclose(seen, np.tile(best, (7, 1)), atol=1e-6)
    far = np.where(np.arange(7)[:, None] == np.argmin(scores), 1e6, ROWS)
    assert np.abs(aggregated(lj.krum(faulty=1, keep=3), far)).max() < 10


def by_member(axes, x):
    """The values [8, ...] of 2 x 4 workers, one row for each member of a group."""
    grid = np.asarray(x, np.float32).reshape(2, 4, -1)
    rows = {"local": grid.swapaxes(0, 1), "node": grid}.get(axes, grid.reshape(8, 1, -1))
    return rows.reshape(len(rows), -1)


@pytest.mark.parametrize(
    "axes",
    ["local", pytest.param("node", marks=pytest.mark.slow), ("node", "local")],
    ids=str,
)
@pytest.mark.parametrize("kind", ["coordinate_median", *KINDS])
def test_shares_of_leaves_of_any_size_on_any_number_of_devices(kind, axes, monkeypatch):
    """All members of a group get the same bits; those of the median are NumPy's."""
    monkeypatch.setattr(packing, "PACKED_BELOW", 100)  # only "padded" has its own buffer
    rng = np.random.default_rng(0)
    shapes = {"cut": (8, 2), "padded": (3, 51), "scalar": (), "empty": (0, 3)}
    g = {k: rng.normal(size=(8, *shape)).astype(np.float32) for k, shape in shapes.items()}
    g["narrow"] = g["cut"].astype(jnp.bfloat16)
    g["cut"][3] = np.nan
    tx = getattr(lj, kind)(axes=axes)
    expected = {}
    if kind == "coordinate_median":
        expected = {k: np.nanmedian(by_member(axes, x), axis=0) for k, x in g.items()}
    for devices in 8, 2, 1:
        workers = lj.Workers(2, 4, devices=jax.devices()[:devices])
        seen = workers.map(lambda g: tx.update(g, tx.init(g))[0])(workers.put(g))
        for name, x in seen.items():
            first, *others = by_member(axes, x)
            for row in others:
                np.testing.assert_array_equal(row, first)
            close = 1e-2 if name == "narrow" else 1e-5
            other = expected.setdefault(name, first)
            np.testing.assert_allclose(first, other, rtol=close, atol=1e-6)


@pytest.mark.parametrize("kind", ["krum", "geometric_median"])
def test_bytes_do_not_grow_with_the_workers(kind):
    """The gradient, 1/W of the result, a count, and W x W or W sums of distances."""
    for W in 2, 4, 8:
        workers, tx = lj.Workers(1, W), KINDS[kind][0]()
        state = lambda g, tx=tx: tx.update(g, tx.init(g))[1]
        (seen,) = lj.diagnostics(workers.map(state)(workers.put(jnp.ones([W, 800]))))
        sums = W * W if kind == "krum" else 32 * W
        assert seen.bytes_sent == 4 * (800 + 800 // W + 1 + sums)


def test_a_sharded_worker_counts_every_coordinate_once():
    """One leaf lies in shards, the other one whole on both devices of each worker."""
    workers = lj.Workers(1, 4, inside={"fsdp": 2})
    rows = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32)
    rows[2] *= 5
    shards, alone = jax.sharding.PartitionSpec("fsdp"), jax.sharding.PartitionSpec()
    tx, parts = lj.geometric_median(), {"a": rows[:, :8], "b": rows[:, 8:]}
    aggregate = lambda g: tx.update(g, tx.init(g), g)[0]
    g = workers.put(parts, specs={"a": shards, "b": alone})
    one = lj.Workers(1, 4, devices=jax.devices()[:1])
    expected = one.map(aggregate)(one.put(parts))
    for a, b in zip(*map(jax.tree.leaves, (workers.map(aggregate)(g), expected))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: lj.krum(-1), "`faulty` must be a positive int"),
        (lambda: lj.krum(1, keep=0), "`keep` must be a positive int"),
        (lambda: lj.trimmed_mean(True), "`cut` must be a positive int"),
        (lambda: lj.geometric_median(0), "`iterations` must be a positive int"),
        (lambda: lj.robust_mean("mean"), "`kind` must be one of 'krum'"),
        (lambda: lj.robust_mean("krum", cut=1), "'krum' takes `faulty`, `keep`, got cut=1"),
        (lambda: lj.Pull(lj.robust_mean("krum"), 1.0, wire="int8"), "must be 'float32'"),
    ],
)
def test_refuses(build, message):
    with pytest.raises(ValueError, match=message):
        build()
