"""Norms of numbers whose squares overflow or vanish."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsgd_jax._src.norms import norm, squares


# The largest has to be finite, and the smallest no subnormal number, which XLA may drop.
SIZES = 1e-35, 1e-30, 1e-19, 1e-12, 1.0, 1e12, 1e19, 1e30, 1e37


@functools.partial(jax.jit, static_argnames="axis")
def norm_of(x, axis=None):
    return norm(squares(x, axis=axis))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_norm_has_all_its_digits_at_any_size(size, dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 4)) * size, dtype)
    expected = np.linalg.norm(np.asarray(x, np.float64))
    np.testing.assert_allclose(float(norm_of(x)), expected, rtol=1e-6)
    rows = np.linalg.norm(np.asarray(x, np.float64), axis=1)
    np.testing.assert_allclose(norm_of(x, axis=1), rows, rtol=1e-6)


def test_sizes_may_differ_and_parts_add_up():
    x = jnp.array([3e-30, 4e-30, 0.0, 2.0, 1e25, 1e-20])
    parts = jax.jit(lambda x: norm(squares(x[:2]) + squares(x[2:])))(x)
    assert float(parts) == float(norm_of(x)) == pytest.approx(1e25, rel=1e-6)
    assert float(norm_of(x[:2])) == pytest.approx(5e-30, rel=1e-6)
    assert float(norm_of(jnp.zeros(2))) == 0


def test_what_is_not_finite_stays_so():
    assert np.isposinf(norm(squares(jnp.array([jnp.inf, 1.0]))))
    assert np.isnan(norm(squares(jnp.array([jnp.nan, 1e30]))))
    assert np.isposinf(norm(squares(jnp.full(4, 3e38))))


def test_ordinary_numbers_have_the_bits_of_a_plain_sum():
    x = jax.random.normal(jax.random.key(0), (1000,))
    np.testing.assert_array_equal(norm(squares(x)), jnp.sqrt(jnp.square(x).sum()))
