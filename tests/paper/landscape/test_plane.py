"""Planes through points of parameter space, with numbers that are computed by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

import lsgd_jax as lj
from paper.landscape import plane
from paper.landscape.compute import frame_of
from paper.landscape.plane import Plane


# Two orthonormal directions.
U, V = np.array([1.0, 2.0, 2.0]) / 3, np.array([2.0, 1.0, -2.0]) / 3


def named(**points):
    return list(points.items())


def test_the_plane_goes_through_its_points():
    origin = np.array([1.0, -1.0, 0.5])
    a, b = origin + 6 * U, origin - 2 * U + 5 * V
    laid, taken = plane.through(origin, named(a=a, b=b))
    np.testing.assert_allclose(laid.basis, [U, V], atol=1e-15)
    np.testing.assert_allclose(taken["a"], [6, 0], atol=1e-14)
    np.testing.assert_allclose(taken["b"], [-2, 5], atol=1e-14)
    for name, point in (("a", a), ("b", b)):
        np.testing.assert_allclose(plane.point_at(laid, taken[name]), point, atol=1e-14)


def test_points_without_a_new_direction_are_skipped():
    origin = np.array([1.0, -1.0, 0.5])
    points = named(
        origin=origin,
        rounded=origin * (1 + 1e-7),
        nan=np.array([np.nan, 0, 0]),
        inf=np.array([0, np.inf, 0]),
        a=origin + 6 * U,
        line=origin - 3 * U + 1e-5 * V,
        b=origin + V,
    )

    def candidates():
        yield from points
        pytest.fail("a third one was asked for")

    _, taken = plane.through(origin, candidates())
    assert list(taken) == ["a", "b"]


def test_points_on_a_line_span_no_plane():
    for points, found in ((named(o=np.zeros(3)), 0), (named(a=U, b=2 * U), 1)):
        with pytest.raises(ValueError, match=f"two directions make a plane, got {found}"):
            plane.through(np.zeros(3), points)


def test_directions_are_orthonormal_for_close_float32_points():
    """As for workers of a network: 100,000 parameters, apart by 1e-3 of their norm."""
    rng = np.random.default_rng(0)
    origin = rng.normal(size=100_000).astype(np.float32)
    a, b = (origin + 1e-3 * rng.normal(size=origin.size) for _ in range(2))
    laid, _ = plane.through(origin, named(a=a.astype("f4"), b=b.astype("f4")))
    np.testing.assert_allclose(laid.basis @ laid.basis.T, np.eye(2), atol=1e-14)


def test_coordinates_of_a_nonfinite_point_are_nan():
    here = Plane(jnp.zeros(3), jnp.stack([U, V]))
    assert np.isnan(plane.coordinates(here, jnp.array([np.nan, 0, 0]))).all()


def test_a_frame_is_a_square_with_a_margin():
    at = lambda *places: np.array([(*place, 0.0) for place in places])
    path, taken = at((5, 4), (5, 4), (1e9, 0)), np.eye(2)
    low, high = frame_of(at((0, 3), (10, 5)), path, taken, margin=0.1)
    assert low.tolist() == [-1, -2] and high.tolist() == [11, 10]
    low, high = frame_of(at((0, 0)), path[:0], taken, margin=0.0)
    assert low.tolist() == [-1, -1] and high.tolist() == [1, 1]


QUADRATIC = np.array([1.0, 10.0, 100.0])  # curvatures


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_quadratic_on_a_plane(devices):
    """f = Σ_k scale_k Σ_i c_i x_i² / 2 at x = o + a u + b v, for 35 places."""
    origin = np.array([1.0, -1.0, 0.5])
    laid = Plane(*(jnp.asarray(x, jnp.float32) for x in (origin, np.stack([U, V]))))
    places = np.stack(np.meshgrid(np.arange(7.0), np.arange(5.0)), axis=-1).reshape(-1, 2)

    traced, done = [], []

    def function(x, scale):
        traced.append(x)
        return jnp.stack([scale * (QUADRATIC * x**2).sum() / 2, scale])

    values = plane.evaluate(
        *(function, laid, places, [1.0, 0.5, 2.0], lj.Workers(1, devices)),
        progress=done.append,
    )
    x = origin + places[:, :1] * U + places[:, 1:] * V
    np.testing.assert_allclose(values[:, 0], 3.5 * x**2 @ QUADRATIC / 2, rtol=1e-5)
    assert values.shape == (35, 2) and values.dtype == np.float64
    assert (values[:, 1] == 3.5).all()
    assert done == sorted(done) and done[-1] == 35
    assert len(traced) == 1  # one compilation for all places and batches


def test_a_nonfinite_value_stays_at_its_place():
    laid = Plane(jnp.zeros(3), jnp.eye(3)[:2])
    places = np.array([[1.0, 0.0], [-1.0, 0.0], [4.0, 0.0]])
    root = lambda x, _: jnp.sqrt(x[:1])
    values = plane.evaluate(root, laid, places, [0], lj.Workers(1, 2))
    np.testing.assert_array_equal(values[:, 0], [1, np.nan, 2])
