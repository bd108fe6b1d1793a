"""Tests of consensus, consensus_distance and center on stacked trees."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lsgd_jax as lj


def test_consensus_leaves_out_workers_that_are_not_finite():
    tree = {
        "w": np.arange(12.0, dtype=np.float32).reshape(4, 3),
        "b": np.ones(4, np.float32),
    }
    tree["b"][2] = np.nan  # excludes all leaves of worker 2
    got = lj.consensus(lj.Workers(2, 2).put(tree))
    np.testing.assert_allclose(got["w"], tree["w"][[0, 1, 3]].mean(axis=0), rtol=1e-6)
    assert float(got["b"]) == 1


def test_consensus_keeps_dtypes_and_sums_in_float32():
    x = jnp.ones((512, 1), jnp.bfloat16)
    got = lj.consensus(x)
    assert got.dtype == jnp.bfloat16 and float(got[0]) == 1


def test_leaves_without_a_mean_come_from_the_first_finite_worker():
    tree = {
        "w": jnp.array([jnp.nan, 2.0, 4.0]),
        "count": jnp.array([7, 8, 9]),
        "flag": jnp.array([False, True, False]),
        "key": jax.random.split(jax.random.key(0), 3),
    }
    got = lj.consensus(tree)
    assert float(got["w"]) == 3 and int(got["count"]) == 8 and bool(got["flag"])
    assert bool(got["key"] == tree["key"][1])
    floats = {"w": tree["w"]}
    assert lj.consensus_distance(tree) == lj.consensus_distance(floats) > 0


def test_consensus_distance_by_hand():
    # x̄ = (2, 0), ‖x_i − x̄‖ = 1, 1, ‖x̄‖ = 2
    assert float(lj.consensus_distance(jnp.array([[1.0, 0.0], [3.0, 0.0]]))) == 0.5


def test_consensus_distance_of_equal_workers_is_zero_even_at_the_origin():
    assert float(lj.consensus_distance({"w": jnp.zeros((4, 2))})) == 0


def test_consensus_distance_ignores_workers_that_are_not_finite():
    x = jnp.array([[1.0, 0.0], [3.0, 0.0], [jnp.inf, 0.0]])
    assert float(lj.consensus_distance(x)) == 0.5


def test_center_prefers_the_center_of_the_method():
    class Other(NamedTuple):  # a user's own state with a field of that name
        center: lj.Shared

    params = jnp.array([[1.0], [3.0]])
    other, own = (kind(lj.Shared(jnp.array([9.0]))) for kind in (Other, lj.CenterState))
    assert lj.center(params, ({"deep": (other, own)},)).tolist() == [9.0]
    assert lj.center(params, (other,)).tolist() == [2.0]


def test_swapped_arguments_and_calls_inside_of_map_are_refused():
    workers = lj.Workers(1, 2, devices=jax.devices()[:1])
    x = workers.put(np.ones((2, 3), np.float32))
    state = workers.map(lj.easgd().init)(x)
    with pytest.raises(ValueError, match=r"`center` takes \(params, opt_state\)"):
        lj.center(state, x)
    for fn in (lj.consensus, lj.is_finite, lj.consensus_distance):
        with pytest.raises(ValueError, match="call it outside of `Workers.map`"):
            workers.map(fn)(x)
    with pytest.raises(ValueError, match="call it outside of `Workers.map`"):
        workers.map(lj.center)(x, state)


def test_a_tree_without_floats_and_an_empty_one_have_a_consensus():
    assert lj.consensus({}) == {}
    assert lj.consensus({"n": jnp.array([3, 4])}) == {"n": 3}
    for tree in ({}, {"n": jnp.array([3, 4])}, {"w": jnp.zeros((2, 0))}):
        assert float(lj.consensus_distance(tree)) == 0


def test_under_jit_and_on_several_workers_per_device():
    workers = lj.Workers(2, 4, devices=jax.devices()[:2])
    x = workers.put(np.arange(8.0, dtype=np.float32)[:, None])
    assert jax.jit(lj.consensus)(x).tolist() == [3.5]
