"""Robust means, as aggregates of gradients and as targets of a pull."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import aggregate, exchanged

import lsgd_jax as lj
import oracles
from lsgd_jax._src.wire import packing


ORACLE = oracles.ROWS["units"]["robust"]
ROWS = np.array(ORACLE["rows"])

KINDS = {
    "trimmed_mean": (lj.robust.trimmed_mean, {"cut": 2}),
    "krum": (lj.robust.krum, {"faulty": 1}),
    "geometric_median": (lj.robust.geometric_median, {}),
}


def tree(rows):
    """Two leaves, the second one of one element."""
    rows = jnp.asarray(rows, jnp.float32)
    return {"a": rows[:, :3], "b": rows[:, 3:]}


def check(seen, row, atol=2e-6):
    """Asserts that each worker has this row of numbers."""
    rows = np.concatenate([seen["a"], seen["b"]], axis=1)
    np.testing.assert_allclose(rows, np.tile(row, (len(rows), 1)), atol=atol)


def expected(kind):
    if kind == "krum":
        return ROWS[ORACLE["krum_1"]]
    return ORACLE["trimmed_mean_2" if kind == "trimmed_mean" else kind]


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_of_both_forms(kind):
    """As an aggregate, and as the target that a pull takes whole."""
    make, options = KINDS[kind]
    check(aggregate(make(**options), tree(ROWS)), expected(kind))
    pull = lj.Pull(lj.rules.robust_mean(kind, **options), 1.0)
    check(exchanged(lj.exchange(pull), lj.Workers(1, 7), tree(ROWS))[0], expected(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_are_not_finite_are_dropped_first(kind):
    make, options = KINDS[kind]
    sick = np.concatenate([ROWS[:2], [[np.nan, 1, 1, np.inf]], ROWS[2:]])
    check(aggregate(make(**options), tree(sick)), expected(kind))
    check(aggregate(make(**options), tree(np.full((8, 4), np.nan))), [np.nan] * 4)


def test_the_median_stands_in_for_what_needs_more_workers():
    for tx in (lj.robust.krum(faulty=3), lj.robust.trimmed_mean(cut=4)):
        check(aggregate(tx, tree(ROWS)), np.median(ROWS, 0), atol=0)


def test_multi_krum_is_the_mean_of_the_best():
    gaps = np.square(ROWS[:, None] - ROWS).sum(-1)
    scores = np.sort(gaps, axis=1)[:, 1:-3].sum(axis=1)  # without itself and f + 1 others
    best = ROWS[np.argsort(scores)[:3]].mean(axis=0)
    # Seven workers are just enough, 2 f + 3.
    check(aggregate(lj.robust.krum(faulty=2, keep=3), tree(ROWS)), best, atol=1e-6)
    far = np.where(np.arange(7)[:, None] == np.argmin(scores), 1e6, ROWS)
    seen = aggregate(lj.robust.krum(faulty=2, keep=3), tree(far))
    assert max(np.abs(x).max() for x in seen.values()) < 10


def by_member(axes, x):
    """The values [8, ...] of 2 x 4 workers, one row for each member of a group."""
    grid = np.asarray(x, np.float32).reshape(2, 4, -1)
    rows = {"local": grid.swapaxes(0, 1), "node": grid}.get(axes, grid.reshape(8, 1, -1))
    return rows.reshape(len(rows), -1)


GROUPS = [("node", "local"), "local", "node"]
# Those whose shares are sorted, and those whose shares are summed.
EVERY = [(kind, axes) for kind in ("coordinate_median", "krum") for axes in GROUPS]
EVERY += [("trimmed_mean", "local"), ("geometric_median", "node")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the workers of a node never meet")
@pytest.mark.parametrize("kind, axes", EVERY)
def test_shares_of_leaves_of_any_size_on_any_number_of_devices(kind, axes, monkeypatch):
    """All members of a group get the same bits; those of the median are NumPy's."""
    monkeypatch.setattr(packing, "PACKED_BELOW", 100)  # only "padded" has its own buffer
    rng = np.random.default_rng(0)
    shapes = {"cut": (8, 2), "padded": (3, 51), "scalar": (), "empty": (0, 3)}
    g = {k: rng.normal(size=(8, *shape)).astype(np.float32) for k, shape in shapes.items()}
    g["narrow"] = g["cut"].astype(jnp.bfloat16)
    g["cut"][3] = np.nan
    tx = getattr(lj.robust, kind)(axes=axes)
    expected = {}
    if kind == "coordinate_median":
        expected = {k: np.nanmedian(by_member(axes, x), axis=0) for k, x in g.items()}
    for devices in 8, 2:
        workers = lj.Workers(2, 4, devices=jax.devices()[:devices])
        seen = workers.map(lambda g: tx.update(g, tx.init(g))[0])(workers.put(g))
        for name, x in seen.items():
            first, *others = by_member(axes, x)
            for row in others:
                np.testing.assert_array_equal(row, first)
            close = 1e-2 if name == "narrow" else 1e-5
            other = expected.setdefault(name, first)
            np.testing.assert_allclose(first, other, rtol=close, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["krum", "geometric_median"])
def test_bytes_do_not_grow_with_the_workers(kind):
    """The gradient, 1/W of the result, a count, and 3 W x W or 3 W sums of squares."""
    for W in 2, 8:
        workers, tx = lj.Workers(1, W), KINDS[kind][0]()
        state = lambda g, tx=tx: tx.update(g, tx.init(g))[1]
        (seen,) = lj.diagnostics(workers.map(state)(workers.put(jnp.ones([W, 800]))))
        sums = 3 * W * W if kind == "krum" else 32 * 3 * W
        assert seen.bytes_sent == 4 * (800 + 800 // W + 1 + sums)
        assert not seen.misplaced.any()  # nothing is known without parameters


@pytest.mark.slow
def test_a_sharded_worker_counts_every_coordinate_once():
    """One leaf lies in shards, the other one, a number, on both devices of each worker."""
    workers = lj.Workers(1, 4, inside={"fsdp": 2})
    rows = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    rows[:, 8] *= 5
    rows[2] *= 5
    shards, alone = jax.sharding.PartitionSpec("fsdp"), jax.sharding.PartitionSpec()
    tx, parts = lj.robust.geometric_median(), {"a": rows[:, :8], "b": rows[:, 8:]}
    g = workers.put(parts, specs={"a": shards, "b": alone})
    seen = workers.map(lambda g: tx.update(g, tx.init(g), g)[0])(g)
    for name, expected in aggregate(tx, parts).items():
        np.testing.assert_allclose(seen[name], expected, rtol=1e-5, atol=1e-6)


def test_a_part_without_floats_stays_as_it_is():
    pull, workers = lj.Pull(lj.rules.robust_mean("krum"), 1.0), lj.Workers(1, 2)
    (seen,) = exchanged(lj.exchange(pull), workers, {"n": jnp.array([[3], [4]])})[:1]
    assert seen["n"].tolist() == [[3], [4]]


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: lj.rules.robust_mean("mean"), "`kind` must be one of 'krum'"),
        (
            lambda: lj.rules.robust_mean("krum", cut=1),
            "'krum' takes `faulty`, `keep`, got cut=1",
        ),
        (
            lambda: lj.Pull(lj.rules.robust_mean("krum"), 1.0, wire="int8"),
            "must be 'float32'",
        ),
    ],
)
def test_refuses(build, message):
    with pytest.raises(ValueError, match=message):
        build()
