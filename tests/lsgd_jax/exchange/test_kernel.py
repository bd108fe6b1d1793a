"""Leaves, losses, states and objects of every kind as inputs of an exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import METHODS, close, exchanged, train

import lsgd_jax as lj


LEAVES = {
    "a_key": np.array([[0, 123456789], [7, 987654321]], np.uint32),
    "count": np.array([2**24 + 1, 2**24 + 3], np.int32),
    "flag": np.array([True, False]),
    "w": np.array([[1.0, 2.0], [3.0, 6.0]], np.float32),
}


UNTOUCHED = {
    "local_sgd": lj.local_sgd(2),
    "diloco": lj.diloco(2),
    "lsgd": lj.lsgd(0.5, 0.5, 7, 2),
    "not_due": lj.local_sgd(100),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTOUCHED)
def test_integers_and_bools_are_bit_identical_also_before_floats(name):
    """As the first leaves, they must not be reported as misplaced."""
    # Integers are updated by 1 on each of 4 steps.
    u = {name: np.full_like(x, 0.5 if name == "w" else 1) for name, x in LEAVES.items()}
    losses, add = [[1, 2]] * 4, optax.apply_updates
    (*_, x), state = train(UNTOUCHED[name], lj.Workers(1, 2), LEAVES, [u] * 4, losses, add)
    np.testing.assert_array_equal(x["a_key"], LEAVES["a_key"] + 4)
    np.testing.assert_array_equal(x["count"], LEAVES["count"] + 4)
    assert x["a_key"].dtype == np.uint32 and x["count"].dtype == np.int32
    assert x["flag"].dtype == np.bool_ and np.isfinite(x["w"]).all()
    assert not sum(level.misplaced for level in lj.diagnostics(state)).any()


def test_the_parameters_alone_decide_which_leaves_are_exchanged():
    """The update of an integer is a float behind `optax.sgd`."""
    tx = optax.chain(optax.sgd(0.5), lj.local_sgd(1))
    x = {"n": jnp.array([4, 4]), "w": jnp.array([1.0, 4.0])}
    g = {"n": np.zeros(2, np.float32), "w": np.zeros(2, np.float32)}
    (moved,), _ = train(tx, lj.Workers(1, 2), x, [g])
    assert moved["w"].tolist() == [2.5, 2.5] and moved["n"].tolist() == [4, 4]
    assert moved["n"].dtype == jnp.int32


COUNTS = {
    **{name: np.iinfo(name).max - 1 for name in ("int8", "uint16", "int32", "uint32")},
    **dict(bool=True, int4=5, float8_e4m3fn=0.875, complex64=1 + 2j),
}


# Made by an optimizer, by `jax.grad` of integers, and of the dtype of the leaf.
@pytest.mark.parametrize(
    "u",
    [
        pytest.param(jnp.float32(0), marks=pytest.mark.slow),
        np.zeros((), jax.dtypes.float0),
        pytest.param(None, marks=pytest.mark.slow),
    ],
)
def test_leaves_that_are_not_exchanged_leave_as_they_came(u):
    """On due steps and others."""
    others = {dtype: jnp.array(count, dtype) for dtype, count in COUNTS.items()}
    zeros = {name: jnp.zeros_like(x) if u is None else u for name, x in others.items()}
    u = {**zeros, "key": jnp.float32(0) if u is None else u, "w": jnp.ones(3)}
    others["key"] = jax.random.key(3)
    params, tx = {**others, "w": jnp.ones(3)}, lj.local_sgd(2, axes=(), part=["w"])
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(u, state, params)
        params = lj.apply_updates(params, updates)
    for name, x in others.items():
        assert params[name].dtype == x.dtype and bool(params[name] == x), name
    assert params["w"].tolist() == [4, 4, 4]


def test_integers_are_updated_as_integers():
    """`optax.apply_updates` adds them as floats: 2^24 + 1 becomes 2^24."""
    x = {"n": jnp.int32(2**24 + 1), "nan": jnp.int32(5)}
    u = {"n": jnp.float32(2), "nan": jnp.float32(jnp.nan)}
    after = lj.apply_updates(x, u)
    assert after == {"n": 2**24 + 3, "nan": 5}


@pytest.mark.slow
def test_trees_without_floats_and_empty_leaves_pass_unchanged():
    tx = lj.exchange(lj.Pull(lj.rules.average(), 1.0))
    for params in ({}, {"n": np.zeros((2,), np.int32)}, {"w": np.zeros((2, 0, 3))}):
        x, _ = exchanged(tx, lj.Workers(1, 2), params)
        jax.tree.map(np.testing.assert_array_equal, x, params)


def test_a_complex_leaf_is_exchanged_under_its_own_path():
    """A part that is not finite is replaced, and the other one is added to."""
    z = np.array([[1 + 2j, 3j], [3 - 4j, 1]], np.complex64)
    x = {"layer": {"k": np.float32([[1], [2]]), "z": z}}
    tx = lj.local_sgd(1, part=lambda path: path == "layer/z")
    workers = lj.Workers(1, 2)
    o = lj.outer(tx)
    moved, state = workers.map(lambda x: o.step(x, o.init(x)))(workers.put(x))
    mean = z.mean(axis=0)
    np.testing.assert_array_equal(moved["layer"]["z"], [mean, mean])
    np.testing.assert_array_equal(moved["layer"]["k"], [[1], [2]])
    np.testing.assert_array_equal(lj.center(moved, state)["layer"]["z"], mean)
    half = complex(np.nan, 1)
    after = lj.apply_updates(jnp.array([half, 1j]), jnp.array([2 + 3j, 4 + 1j]))
    assert after.tolist() == [2 + 4j, 4 + 2j]
    fine = lj.apply_updates(jnp.float32(1 + 2**-20), jnp.bfloat16(1))
    assert fine == 2 + 2**-20


def test_leaves_that_cannot_be_summed_must_be_excluded():
    dtype = jnp.float8_e4m3fn
    workers, x = lj.Workers(1, 2), {"w": jnp.ones((2, 3)), "z": jnp.ones((2, 3), dtype)}
    with pytest.raises(ValueError, match=r"must be of float16, .* got .* at \['z'\]"):
        exchanged(lj.local_sgd(2), workers, x)
    tx = lj.exchange(lj.Pull(lj.rules.average(), 1.0, part=lambda path: path == "w"))
    (moved,), _ = train(tx, workers, x, [x])
    assert moved["z"].dtype == dtype
    np.testing.assert_array_equal(moved["z"], 2 * x["z"])


@pytest.mark.slow
def test_the_loss_has_two_names_and_may_be_any_number():
    tx, workers = lj.lsgd(0.5, 0.5, 1, 1), lj.Workers(1, 2)
    given = [{"value": 1}, {"loss": np.float64(1)}, {"loss": jnp.bfloat16(1)}]
    x = workers.put(np.array([[0.0], [8.0]], np.float32))
    before = workers.map(tx.init)(x)
    update = lambda x, s: [tx.update(0 * x, s, x, **loss) for loss in given]
    for u, state in workers.map(update)(x, before):
        close(u, np.array([[0.0], [-6.0]]))
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, before)
    # Beside a loss that is not finite, elements of the update that are not are dropped.
    tx = lj.local_sgd(5, axes=())
    x = jnp.ones(2)
    for loss, first in ((jnp.nan, 0.0), (1.0, jnp.nan)):
        u, _ = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(x), x, value=loss)
        np.testing.assert_array_equal(u, [first, 1.0])


@pytest.mark.parametrize(
    "given, message",
    [
        ({"value": 1.0, "loss": 2.0}, "as `value=` or as `loss=`, got both"),
        ({"value": "low"}, "must be the worker's loss, a scalar"),
        ({"value": {"loss": 1}}, "must be the worker's loss, a scalar"),
        ({"value": jnp.ones(1)}, "a scalar: .*got "),
        ({}, "loss=loss"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(given, message):
    tx, x = lj.lsgd(0.5, 0.5, 1, 1), np.zeros((2, 1), np.float32)
    with pytest.raises(ValueError, match=message):
        lj.Workers(1, 2).map(lambda x: tx.update(x, tx.init(x), x, **given))(x)


def test_wrong_objects_are_refused():
    with pytest.raises(
        ValueError, match="a base optimizer or an aggregation stands before"
    ):
        lj.exchange(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"got Rule: wrap it in lj.Pull\(rule"):
        lj.exchange(lj.rules.average())
    with pytest.raises(ValueError, match="`rule` must be a Rule"):
        lj.Pull(lj.diloco(3), 0.5)


def test_states_and_updates_of_another_method_are_refused():
    workers = lj.Workers(1, 2)
    x = workers.put({"w": np.ones((2, 3), np.float32)})
    tx, other = lj.diloco(2), lj.exchange(lj.Pull(lj.rules.leader("local"), 0.5))
    update = lambda tx: workers.map(lambda u, s, x: tx.update(u, s, x, value=0.0))
    mine, theirs = workers.map(tx.init)(x), workers.map(other.init)(x)
    with pytest.raises(
        ValueError, match="`state` must be what the `init` of this exchange"
    ):
        update(tx)(x, theirs, x)
    with pytest.raises(ValueError, match="`state` must be what the `init`"):
        update(tx)(x, optax.EmptyState(), x)
    with pytest.raises(
        ValueError, match=r"shapes of the parameters, got \(2,\) for \(3,\)"
    ):
        update(tx)({"w": x["w"][:, :2]}, mine, x)
    with pytest.raises(ValueError, match="`updates` must be a tree like the parameters"):
        update(tx)({"v": x["w"]}, mine, x)


WITHOUT_WIRES = [name for name in METHODS if "+" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_WIRES)
def test_a_state_is_the_same_from_outside_of_mapped_functions(name):
    """There all workers start from the same parameters, as with `nnx.Optimizer`."""
    tx, workers = METHODS[name].make(8), lj.Workers(4, 2)
    params = {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(4)}
    outside, inside = tx.init(params), workers.map(tx.init)(workers.replicate(params))
    assert jax.tree.structure(outside) == jax.tree.structure(inside)
    shared = lambda node: isinstance(node, lj.Shared)
    for a, b in zip(*(jax.tree.leaves(x, is_leaf=shared) for x in (outside, inside))):
        if shared(a) and b.axes is None:
            close(a, b)
