"""Methods that weigh workers: GRAWA, EDiT's guard, and the merge of Decoupled DiLoCo."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import CASES_2026, after, around, inputs_2026, mostly_slow, train_rows

import lsgd_jax as lj


CASES = {
    name: case
    for name, case in CASES_2026.items()
    if case["method"] in ("grawa", "edit", "decoupled")
}


def method_of(case):
    """The method of an oracle's settings."""
    settings = dict(case["settings"])
    period = settings.pop("period")
    if case["method"] == "grawa":
        layerwise = settings.pop("level") == "layer"
        return lj.contrib.grawa(settings.pop("strength"), period, layerwise, **settings)
    rate, momentum = settings.pop("rate", 0.7), settings.pop("momentum", 0.9)
    outer = optax.sgd(rate, momentum, nesterov=True)
    if case["method"] == "edit":
        layerwise = settings.pop("level", "model") == "layer"
        decay = settings.pop("alpha")
        guard = lj.Guard(decay=decay, layerwise=layerwise, **settings)
        return lj.diloco(period, outer, guard=guard)
    tokens, steps = settings.pop("tokens"), settings.pop("steps")
    weights = tuple(n * n / k for n, k in zip(tokens, steps))
    merge = {"rda": "radial", "avg": "mean"}[settings.pop("merge")]
    return lj.diloco(period, outer, merge=merge, weights=weights)


def inputs(case):
    start, gradients = inputs_2026(case)
    for t, i, factor in case["spikes"]:
        gradients[t - 1, i] *= factor
    return start, gradients


FAST = "mgrawa-4 lgrawa-2 edit-4 edit_layer-3 decoupled_rda-3 decoupled_avg-3".split()


@pytest.mark.parametrize("name", mostly_slow(CASES, fast=FAST))
def test_oracle(name):
    case = CASES[name]
    start, gradients = inputs(case)
    tx = optax.chain(optax.sgd(case["base"][1]["lr"]), method_of(case))
    devices = 1 if case["workers"] % 2 else 8
    seen, _ = train_rows(tx, start, gradients, devices)
    np.testing.assert_allclose(seen, case["params"], rtol=1e-5, atol=2e-6)


# GRAWA


def with_gradient(x, batch):
    return {"grad": batch}


@pytest.mark.parametrize("layerwise", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_gradient_is_read_where_the_base_is_not_sgd(layerwise):
    """The weights are those of |g|, with `grad=` in a chain and in `outer`."""
    rng = np.random.default_rng(1)
    start, gradients = rng.normal(size=(3, 17)), rng.normal(size=(4, 3, 17))
    gradients *= [[[1], [5], [20]]]  # of which Adam's first step shows nothing
    base, method = optax.adam(0.1), lj.contrib.grawa(1.0, 1, layerwise, decay=0.0)
    tx = optax.chain(base, method)
    seen, _ = train_rows(tx, start, gradients, extra=with_gradient)
    blind, _ = train_rows(tx, start, gradients)
    leaves = [slice(0, 12), slice(12, 17)]
    norms = np.stack([np.linalg.norm(gradients[0][:, i], axis=1) for i in leaves], 1)
    norms = norms if layerwise else np.tile(norms.sum(1, keepdims=True), 2)
    weights = (1 / norms) / (1 / norms).sum(0)
    y = start - 0.1 * np.sign(gradients[0])
    expected = np.concatenate([w @ y[:, i] for w, i in zip(weights.T, leaves)])
    np.testing.assert_allclose(seen[0], np.tile(expected, (3, 1)), rtol=1e-4, atol=1e-5)
    assert np.abs(blind[0] - seen[0]).max() > 0.1
    outer, grad = around(lj.outer(method), base), with_gradient
    outside, _ = train_rows(outer, start, gradients, extra=grad, apply=after)
    np.testing.assert_allclose(outside, seen, rtol=1e-5, atol=2e-6)


def test_a_power_of_0_is_a_soft_pull_to_the_mean():
    start, gradients = np.zeros((3, 17)), np.random.default_rng(2).normal(size=(4, 3, 17))
    pulls = (
        lj.contrib.grawa(0.3, 2, power=0),
        lj.exchange(lj.Pull(lj.average(), 0.3, every=2)),
    )
    seen, mean = (
        train_rows(optax.chain(optax.sgd(0.1), p), start, gradients)[0] for p in pulls
    )
    np.testing.assert_allclose(seen, mean, rtol=1e-5, atol=1e-6)


def test_a_norm_of_0_takes_all_the_weight_and_several_share_it():
    start, gradients = np.random.default_rng(3).normal(size=(3, 17)), np.ones((2, 3, 17))
    gradients[:, 0] = 0
    tx = optax.chain(optax.sgd(0.1), lj.contrib.grawa(1.0, 1))
    seen, _ = train_rows(tx, start, gradients)
    np.testing.assert_allclose(seen[0], np.tile(start[0], (3, 1)), rtol=1e-5)
    seen, _ = train_rows(tx, start, 0 * gradients)
    np.testing.assert_allclose(seen[0], np.tile(start.mean(0), (3, 1)), atol=1e-6)


def test_a_worker_that_was_not_finite_starts_its_average_anew():
    start, gradients = np.zeros((3, 17)), np.random.default_rng(4).normal(size=(3, 3, 17))
    gradients[1, 2] = np.nan
    base = optax.apply_if_finite(optax.sgd(0.1), 9)
    tx = optax.chain(base, lj.contrib.grawa(0.5, 1))
    seen, state = train_rows(tx, start, gradients, extra=with_gradient)
    assert np.isfinite(seen).all()
    rule = state[1].pulls[0].rule
    assert rule.count.tolist() == [3, 3, 1]
    new = np.linalg.norm(gradients[2, 2, :12]) + np.linalg.norm(gradients[2, 2, 12:])
    np.testing.assert_allclose(rule.norms[2], (1 - 0.43046721) * new, rtol=1e-5)
    assert lj.diagnostics(state)[0].restored.tolist() == [0, 0, 1]
    kept = lj.resize(state, [2, 0])[1].pulls[0].rule
    assert kept.count.tolist() == [1, 3] and kept.norms[1] == rule.norms[0]


# The guard


def test_a_worker_with_a_gradient_20_times_as_large_has_no_influence():
    """At t = 8 worker 1 is anomalous: the rest goes on as if it stood at the anchor."""
    case = CASES["edit-3"]
    start, gradients = inputs(case)
    tx = optax.chain(optax.sgd(0.1), method_of(case))
    seen, _ = train_rows(tx, start, gradients[:8])
    far = gradients[:8].copy()
    far[7, 1] *= 50
    again, _ = train_rows(tx, start, far)
    np.testing.assert_array_equal(seen[7], again[7])


@pytest.mark.parametrize("wire", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_all_bad_rolls_back_what_is_bad(wire):
    """Leaf b of all workers jumps after the warm-up: its anchor and momentum stay."""
    outer = optax.sgd(optax.constant_schedule(0.5), 0.9)
    guard = lj.Guard(warmup=2, threshold=1.0, decay=0.3, layerwise=True)
    gradients = np.random.default_rng(5).normal(size=(5, 2, 17))
    gradients[4, :, 12:] *= 100
    tx = optax.chain(optax.sgd(0.1), lj.diloco(1, outer, guard=guard, wire=wire))
    seen, state = train_rows(tx, np.zeros((2, 17)), gradients, 2)
    _, before = train_rows(tx, np.zeros((2, 17)), gradients[:4], 2)
    np.testing.assert_array_equal(seen[4, :, 12:], seen[3, :, 12:])
    assert np.abs(seen[4, :, :12] - seen[3, :, :12]).max() > 1e-2
    outers = [s[1].pulls[0].rule.outer for s in (state, before)]
    after, before = (optax.tree.get(outer, "trace") for outer in outers)
    same = {leaf: bool((after[leaf] == before[leaf]).all()) for leaf in after}
    assert same == {"a": False, "b": True}
    assert optax.tree.get(outers[0], "count").tolist() == [5, 4]


def test_a_high_temperature_weighs_all_alike():
    start, gradients = np.zeros((3, 17)), np.random.default_rng(6).normal(size=(4, 3, 17))
    alike = lj.Guard(temperature=float("inf"))
    methods = lj.diloco(2, guard=alike), lj.diloco(2)
    seen, plain = (
        train_rows(optax.chain(optax.sgd(0.1), method), start, gradients)[0]
        for method in methods
    )
    np.testing.assert_allclose(seen, plain, rtol=1e-5, atol=1e-6)


# Merges and restarts


def outer_sgd(**options):
    return optax.chain(optax.sgd(1.0), lj.diloco(1, optax.sgd(1.0), **options))


def merged(tx, gradients):
    """The step of the anchor from 0 that an outer rate of 1 takes: [17], of each worker."""
    start = np.zeros((len(gradients), 17))
    seen, _ = train_rows(tx, start, np.asarray(gradients)[None], devices=8)
    np.testing.assert_array_equal(seen[0], np.tile(seen[0, 0], (len(gradients), 1)))
    return -seen[0, 0]


def test_where_directions_cancel_the_radial_merge_is_the_mean():
    """In leaf b alone; in leaf a they are orthogonal, and the norm stays."""
    g = np.zeros((2, 17))
    g[0, 0] = g[1, 1] = 2.0
    g[:, 12:] = np.array([[1.0], [-3.0]]) * np.random.default_rng(7).normal(size=5)
    radial = outer_sgd(merge="radial")
    delta = merged(radial, g)
    np.testing.assert_allclose(delta[:2], [2**0.5, 2**0.5], rtol=1e-6)
    np.testing.assert_allclose(delta[12:], g[:, 12:].mean(0), rtol=1e-5)
    assert np.abs(merged(radial, 0 * g)).max() == 0
    np.testing.assert_allclose(merged(radial, g[:1]), g[0], rtol=1e-6)


@pytest.mark.parametrize("merge", [pytest.param("mean", marks=pytest.mark.slow), "radial"])
def test_a_worker_that_is_not_finite_does_not_weigh(merge):
    g = np.random.default_rng(8).normal(size=(3, 17))
    sick = np.concatenate([g[:1], np.full((1, 17), np.nan), g[1:]])
    weighed = merged(outer_sgd(merge=merge, weights=(1, 2, 3)), g)
    found = merged(outer_sgd(merge=merge, weights=(1, 9, 2, 3)), sick)
    np.testing.assert_allclose(found, weighed, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"one number per worker \(3\), got 2"):
        merged(outer_sgd(merge=merge, weights=(1, 2)), g)


@pytest.mark.parametrize("name", ["diloco", "slowmo", "injected"])
def test_every_second_exchange_begins_without_momentum(name):
    """Schedules of the outer optimizer go on."""
    rates = [0.5, 0.25, 0.125, 0.0625]
    rate = lambda k: jnp.asarray(rates)[k]
    gradients, m, x = np.random.default_rng(9).normal(size=(4, 1, 17)), 0.0, 0.0
    if name == "slowmo":
        method = lj.slowmo(1, 1.0, 0.5, lambda t: rate(t - 1), restart=2)
    else:
        inject = optax.inject_hyperparams(optax.sgd, ("momentum",))
        outer = inject(rate, momentum=0.5) if name == "injected" else optax.sgd(rate, 0.5)
        method = lj.diloco(1, outer, restart=2)
    tx = optax.chain(optax.sgd(1.0), method)
    seen, _ = train_rows(tx, np.zeros((1, 17)), gradients)
    for k, (g, eta) in enumerate(zip(gradients[:, 0], rates), start=1):
        m = 0.5 * (0.0 if k % 2 == 0 else m) + (g / eta if name == "slowmo" else g)
        x = x - eta * m
        np.testing.assert_allclose(seen[k - 1, 0], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: lj.contrib.grawa(decay=1), "`decay` must be less than 1"),
        (
            lambda: lj.contrib.grawa(period=5, fragments=2),
            "`fragments` must divide the period",
        ),
        (lambda: lj.diloco(2, merge="radial", wire="int8"), "`wire` must be 'float32'"),
        (lambda: lj.diloco(2, guard=lj.Guard(), weights=(1,)), "`weights` must be None"),
    ],
)
def test_refuses(build, message):
    with pytest.raises(ValueError, match=message):
        build()
