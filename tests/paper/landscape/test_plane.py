"""Planes through points of parameter space, in numbers that can be worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import lsgd_jax as lj
from paper.landscape import plane
from paper.landscape.compute import frame_of
from paper.landscape.plane import Plane


# Two directions of length 3, at right angles, and the plane they span.
U, V = np.array([1.0, 2.0, 2.0]) / 3, np.array([2.0, 1.0, -2.0]) / 3
NORMAL = np.array([2.0, -2.0, 1.0]) / 3


def named(**points):
    return list(points.items())


# Laying the plane


def test_the_first_point_gives_the_first_axis_and_the_second_the_rest():
    origin = np.array([1.0, -1.0, 0.5])
    a, b = origin + 6 * U, origin - 2 * U + 5 * V
    laid, taken = plane.through(origin, named(a=a, b=b))
    np.testing.assert_allclose(laid.basis, [U, V], atol=1e-15)
    np.testing.assert_allclose(taken["a"], [6, 0], atol=1e-14)
    np.testing.assert_allclose(taken["b"], [-2, 5], atol=1e-14)
    for name, point in (("a", a), ("b", b)):
        np.testing.assert_allclose(plane.point_at(laid, taken[name]), point, atol=1e-14)


def test_what_gives_no_new_direction_is_passed_over():
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
    _, taken = plane.through(origin, points)
    assert list(taken) == ["a", "b"]


def test_no_candidate_is_asked_for_once_there_are_two():
    def candidates():
        yield "a", U
        yield "b", V
        pytest.fail("a third one was asked for")

    plane.through(np.zeros(3), candidates())


def test_a_point_or_a_line_is_no_plane():
    for points, found in ((named(o=np.zeros(3)), 0), (named(a=U, b=2 * U), 1)):
        with pytest.raises(ValueError, match=f"two directions make a plane, got {found}"):
            plane.through(np.zeros(3), points)


def test_directions_are_orthonormal_where_float32_points_are_many_and_close():
    """Workers of a network: 100,000 numbers, apart by 1e-3 of their norm."""
    rng = np.random.default_rng(0)
    origin = rng.normal(size=100_000).astype(np.float32)
    a, b = (origin + 1e-3 * rng.normal(size=origin.size) for _ in range(2))
    laid, _ = plane.through(origin, named(a=a.astype("f4"), b=b.astype("f4")))
    np.testing.assert_allclose(laid.basis @ laid.basis.T, np.eye(2), atol=1e-14)


# Coordinates


def test_coordinates_are_along_the_plane_and_off_it():
    here = Plane(jnp.array([1.0, -1.0, 0.5]), jnp.stack([U, V]))
    point = here.origin + 2 * U - 3 * V - 4 * NORMAL
    np.testing.assert_allclose(plane.coordinates(here, point), [2, -3, 4], rtol=1e-5)
    at = plane.point_at(here, jnp.array([2.0, -3.0]))
    np.testing.assert_allclose(plane.coordinates(here, at), [2, -3, 0], atol=1e-6)


def test_a_point_that_is_not_finite_has_no_coordinates():
    here = Plane(jnp.zeros(3), jnp.stack([U, V]))
    assert np.isnan(plane.coordinates(here, jnp.array([np.nan, 0, 0]))).all()


def test_random_filters_are_as_long_as_the_parameters_own():
    rng = np.random.default_rng(1)
    params = {
        "conv": rng.normal(size=(3, 3, 2, 4)).astype(np.float32),
        "zero": np.zeros((5, 2), np.float32),
        "bias": np.ones(4, np.float32),
    }
    direction = plane.filterwise_random(0, params)
    norms = lambda x: np.linalg.norm(x.reshape(-1, x.shape[-1]), axis=0)
    np.testing.assert_allclose(norms(direction["conv"]), norms(params["conv"]), rtol=1e-5)
    assert not direction["zero"].any() and not direction["bias"].any()
    assert direction["conv"].dtype == np.float32
    again, other = (plane.filterwise_random(seed, params)["conv"] for seed in (0, 1))
    np.testing.assert_array_equal(direction["conv"], again)
    assert np.abs(direction["conv"] - other).max() > 0.1


# The grid


def test_a_frame_is_a_square_with_a_margin():
    at = lambda *places: np.array([(*place, 0.0) for place in places])
    path, taken = at((5, 4), (5, 4), (1e9, 0)), np.eye(2)
    low, high = frame_of(at((0, 3), (10, 5)), path, taken, margin=0.1)
    assert low.tolist() == [-1, -2] and high.tolist() == [11, 10]
    low, high = frame_of(at((0, 0)), path[:0], taken, margin=0.0)
    assert low.tolist() == [-1, -1] and high.tolist() == [1, 1]


QUADRATIC = np.array([1.0, 10.0, 100.0])  # curvatures


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_contours_of_a_quadratic_are_those_of_the_formula(devices):
    """f = Σ_k scale_k Σ_i c_i x_i² / 2 at x = o + a u + b v, for 35 places."""
    origin = np.array([1.0, -1.0, 0.5])
    laid = Plane(*(jnp.asarray(x, jnp.float32) for x in (origin, np.stack([U, V]))))
    places = np.stack(np.meshgrid(np.arange(7.0), np.arange(5.0)), axis=-1).reshape(-1, 2)

    def function(x, scale):
        return jnp.stack([scale * (QUADRATIC * x**2).sum() / 2, scale])

    done = []
    values = plane.evaluate(
        *(function, laid, places, [1.0, 0.5, 2.0], lj.Workers(1, devices)),
        progress=done.append,
    )
    x = origin + places[:, :1] * U + places[:, 1:] * V
    np.testing.assert_allclose(values[:, 0], 3.5 * x**2 @ QUADRATIC / 2, rtol=1e-5)
    assert values.shape == (35, 2) and values.dtype == np.float64
    assert (values[:, 1] == 3.5).all()
    assert done == sorted(done) and done[-1] == 35


def test_what_is_not_finite_at_one_place_stays_there():
    laid = Plane(jnp.zeros(3), jnp.eye(3)[:2])
    places = np.array([[1.0, 0.0], [-1.0, 0.0], [4.0, 0.0]])
    root = lambda x, _: jnp.sqrt(x[:1])
    values = plane.evaluate(root, laid, places, [0], lj.Workers(1, 2))
    np.testing.assert_array_equal(values[:, 0], [1, np.nan, 2])


def test_a_function_is_compiled_once_for_all_places_and_batches():
    traced = []

    def function(x, scale):
        traced.append(x)
        return scale * x[:1]

    laid = Plane(jnp.zeros(3), jnp.eye(3)[:2])
    places = np.zeros((20, 2))
    plane.evaluate(function, laid, places, [1.0, 2.0], lj.Workers(1, 4))
    assert len(traced) == 2  # two traces make a compilation


def test_flat_is_the_order_of_jax():
    tree = {"b": np.arange(4.0).reshape(2, 2), "a": np.array(7.0)}
    vector, back = ravel_pytree(tree)
    np.testing.assert_array_equal(plane.flat(tree), vector)
    np.testing.assert_array_equal(back(plane.flat(tree))["b"], tree["b"])
