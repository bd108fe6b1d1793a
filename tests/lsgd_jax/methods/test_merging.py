"""The merges of pseudo-gradients: radial, weighted, and where workers are not finite."""

import numpy as np
import optax
import pytest
from harness import train_rows

import lsgd_jax as lj


def outer_sgd(**options):
    return optax.chain(optax.sgd(1.0), lj.diloco(1, optax.sgd(1.0), **options))


def merged(tx, gradients):
    """The step of the anchor from 0 that an outer rate of 1 takes: [17], of each worker."""
    start = np.zeros((len(gradients), 17))
    seen, _ = train_rows(tx, start, np.asarray(gradients)[None])
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


@pytest.mark.slow  # `test_weights_of_any_size_…` has a worker that is not finite
@pytest.mark.parametrize("merge", ["mean", "radial"])
def test_a_worker_that_is_not_finite_does_not_weigh(merge):
    g = np.random.default_rng(8).normal(size=(3, 17))
    sick = np.concatenate([g[:1], np.full((1, 17), np.nan), g[1:]])
    weighed = merged(outer_sgd(merge=merge, weights=(1, 2, 3)), g)
    found = merged(outer_sgd(merge=merge, weights=(1, 9, 2, 3)), sick)
    np.testing.assert_allclose(found, weighed, rtol=1e-5, atol=1e-6)


def test_weights_of_another_number_of_workers_are_refused():
    with pytest.raises(ValueError, match=r"one number per worker \(3\), got 2"):
        merged(outer_sgd(weights=(1, 2)), np.ones([3, 17]))


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param((2e38, 1e38), marks=pytest.mark.slow),
        pytest.param((1e-44, 5e-45), marks=pytest.mark.slow),
        (1e308, 5e307),
    ],
)
def test_weights_of_any_size_count_by_their_ratio(weights):
    """Also where a worker is lost beside whose weight they were negligible.

    One worker has no weight.
    """
    g = np.random.default_rng(8).normal(size=(4, 17))
    g[0] = np.nan
    ratio = weights[1] / weights[0]
    expected = (g[1] + ratio * g[2]) / (1 + ratio)
    found = merged(outer_sgd(weights=(1.7e308, *weights, 0)), g)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
