"""GRAWA: the gradient that it reads, its limits, and workers that are not finite."""

import numpy as np
import optax
import pytest
from harness import after, around, train_rows

import lsgd_jax as lj


def with_gradient(x, batch):
    return {"grad": batch}


@pytest.mark.slow
@pytest.mark.parametrize("layerwise", [False, True])
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
        lj.exchange(lj.Pull(lj.rules.average(), 0.3, every=2)),
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


@pytest.mark.slow
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
