"""Tests of consensus, consensus_distance and center on stacked trees."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def test_consensus_distance_of_complex_leaves_by_hand():
    # x̄ = 2, |x_i − x̄| = √2
    x = jnp.array([1 + 1j, 3 - 1j])
    np.testing.assert_allclose(lj.consensus_distance(x), 0.5**0.5, rtol=1e-6)
    both = {"c": x, "w": jnp.array([1.0, 3.0])}  # √(2 + 1) / √(4 + 4)
    np.testing.assert_allclose(lj.consensus_distance(both), (3 / 8) ** 0.5, rtol=1e-6)


@pytest.mark.slow
def test_dtypes_that_jax_does_not_promote_by_itself():
    narrow = jnp.array([[1.0, 2.0], [3.0, 4.0]], jnp.float8_e4m3fn)
    assert lj.consensus(narrow).tolist() == [2, 3]
    with jax.numpy_dtype_promotion("strict"):
        x = jnp.array([[1.0, 0.0], [3.0, 0.0]])
        assert lj.consensus(x).tolist() == [2, 0] and lj.consensus_distance(x) == 0.5
        state = lj.diloco(2, axes=()).init(jnp.ones(3, jnp.bfloat16))
        assert state.pulls[0].rule.anchor.value.dtype == jnp.float32


def test_consensus_distance_of_equal_workers_is_zero_even_at_the_origin():
    assert float(lj.consensus_distance({"w": jnp.zeros((4, 2))})) == 0


def test_consensus_distance_ignores_workers_that_are_not_finite():
    x = jnp.array([[1.0, 0.0], [3.0, 0.0], [jnp.inf, 0.0]])
    assert float(lj.consensus_distance(x)) == 0.5


@pytest.mark.parametrize(
    "rows, message",
    [
        (
            [[1.0, 2.0], [1.0, 2.5]],
            "workers differ at ['w'], worker 1 from worker 0 by 0.5",
        ),
        ([[1.0, jnp.nan], [1.0, 2.0]], "worker 1 from worker 0 by nan"),
        ([[1.0, jnp.inf], [1.0, 2.0]], "worker 1 from worker 0 by inf"),
        (np.array([[2**24], [2**24 + 1]]), "worker 1 from worker 0 by 1"),
        ([[True], [False]], "worker 1 from worker 0 by 1"),
        (jax.random.split(jax.random.key(0)), "worker 1 from worker 0 by 1"),
        ([[1.0, jnp.nan], [1.0 + 1e-7, jnp.nan]], None),
        (jnp.ones([3, 0]), None),
    ],
)
def test_workers_that_differ_are_noticed_before_one_of_them_is_kept(rows, message):
    tree = {"t": lj.Shared(jnp.arange(2)), "w": jnp.asarray(rows)}
    if message is None:
        lj.checks.check_workers_agree(tree)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        lj.checks.check_workers_agree(tree)


def over_a_pmap(f):
    return jax.pmap(f, axis_name="batch")


def over_an_explicit_axis(f):
    mesh = jax.make_mesh((4, 2), ("batch", "fsdp"))
    return lj.Workers(mesh=mesh, axes="batch").map(f)


@pytest.mark.slow
@pytest.mark.parametrize(
    "map",
    [
        over_a_pmap,
        over_an_explicit_axis,
    ],
)
def test_workers_agree_only_behind_a_pull_of_strength_1(map):
    """Under `pmap`, and on explicit axes; momenta stay with their worker."""
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), lj.local_sgd(2, axes="batch"))
    x = jnp.arange(16.0).reshape(4, 4)

    def step(x, state):
        updates, state = tx.update(x, state, x)
        return lj.apply_updates(x, updates), state

    step = map(step)
    after, state = step(x, map(tx.init)(x))
    with pytest.raises(ValueError, match="`lj.center.params, opt_state.`"):
        lj.checks.check_workers_agree(after)
    after, state = step(after, state)
    lj.checks.check_workers_agree(after)
    with pytest.raises(ValueError, match="worker 1 from worker 0"):
        lj.checks.check_workers_agree(state)


def test_center_prefers_the_center_of_the_method():
    class Other(NamedTuple):  # a user's own state with a field of that name
        center: lj.Shared

    params = jnp.array([[1.0], [3.0]])
    other, own = (kind(lj.Shared(jnp.array([9.0]))) for kind in (Other, lj.CenterState))
    assert lj.center(params, ({"deep": (other, own)},)).tolist() == [9.0]
    assert lj.center(params, (other,)).tolist() == [2.0]


OTHER_TREES = {
    "another shape": {"a": (2, 3), "b": (2,)},
    "fewer dimensions": {"a": (2, 2), "b": (2,)},
    "more leaves": {"a": (2, 4, 2), "b": (2,), "c": (2,)},
    "other names": {"mean": (2, 4, 2), "var": (2,)},
    "below it": {"a": {"mean": (2, 4, 2)}, "b": (2,)},
    "fewer leaves": {"a": (2, 4, 2)},
    "an array": (2, 4, 2),
}


@pytest.mark.parametrize("cut", [False, True])
def test_another_tree_than_the_parameters_has_its_mean(cut):
    """Such as batch statistics, beside a method that keeps a center of the parameters."""
    options = {"fragments": 2, "scan_axis": {"a": 0}} if cut else {}
    workers = lj.Workers(1, 2)
    x = workers.put({"a": np.ones([2, 4, 2], np.float32), "b": np.ones(2, np.float32)})
    state = workers.map(lj.easgd(0.5, 2, **options).init)(x)
    moved = jax.tree.map(lambda x: x + 1, x)
    assert jax.tree.map(lambda c: c.max(), lj.center(moved, state)) == {"a": 1, "b": 1}
    for shapes in OTHER_TREES.values():
        other = jax.tree.map(
            lambda shape: jnp.stack([jnp.zeros(shape[1:]), jnp.ones(shape[1:])]),
            shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )
        found = lj.center(other, state)
        expected = jax.tree.map(lambda x: np.full(x.shape[1:], 0.5), other)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_swapped_arguments_and_calls_inside_of_map_are_refused():
    workers = lj.Workers(1, 2)
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


CENTERS = {
    "all": lj.easgd(0.5, 1),
    "part": lj.easgd(0.5, 1, part=["a"]),
    "fragments": lj.easgd(0.5, 2, fragments=2),
    "cut leaves": lj.easgd(0.5, 2, fragments=2, scan_axis={"a": 0}),
    "masked": optax.masked(lj.easgd(0.5, 1), {"a": True, "b": False, "n": False}),
    "partition": optax.partition(
        {"x": lj.easgd(0.5, 1), "y": optax.set_to_zero()}, {"a": "x", "b": "y", "n": "y"}
    ),
    "with_state": lj.with_state(optax.trace(0.9), lj.easgd(0.5, 1), "trace"),
    "parle": lj.parle(0.1, part=["a"]),
}


ONLY_A = "part", "masked", "partition", "parle"


@pytest.mark.parametrize("name", CENTERS)
def test_leaves_without_a_center_have_their_consensus(name):
    """The center of a leaf that is exchanged is not the mean of the workers."""
    workers, tx = lj.Workers(1, 2), CENTERS[name]
    params = {"a": jnp.array([[0.0, 4.0], [2.0, 8.0]]), "b": jnp.array([1.0, 3.0])}
    params = workers.put(params | {"n": jnp.array([7, 8])})
    state = workers.map(tx.init)(params)
    moved = jax.tree.map(lambda x: x + 10, params)
    center = lj.center(moved, state)
    assert center["a"].tolist() == [1, 6]  # the mean of the starts
    assert float(center["b"]) == (12 if name in ONLY_A else 2)
    assert int(center["n"]) == 17 and center["n"].dtype == jnp.int32


@pytest.mark.parametrize(
    "method, has_center",
    [
        (lj.easgd(0.5, 2), True),
        (lj.easgd(0.5, 2, fragments=2), True),
        (lj.easgd(0.5, 2, part=["a"]), False),
        (lj.easgd(0.5, 2, axes="local"), False),
        (lj.diloco(2), False),  # its anchor is that of the last exchange
        (lj.lsgd(), False),
    ],
    ids=["whole", "fragments", "a part", "of each node", "an anchor", "a leader"],
)
def test_methods_with_one_center_of_all_parameters(method, has_center):
    workers = lj.Workers(2, 1)
    params = workers.replicate({"a": jnp.zeros([2, 4]), "b": jnp.zeros([2])})
    state = workers.map(method.init)(params)
    assert lj.has_center(params, state) == has_center


def test_under_jit_and_on_several_workers_per_device():
    workers = lj.Workers(2, 4, devices=jax.devices()[:2])
    x = workers.put(np.arange(8.0, dtype=np.float32)[:, None])
    assert jax.jit(lj.consensus)(x).tolist() == [3.5]
