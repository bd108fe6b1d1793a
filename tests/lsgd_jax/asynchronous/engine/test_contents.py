"""Vectors on the wire: rounding, error feedback, bytes."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import moving

import lsgd_jax as lj
from lsgd_jax._src.asynchronous.engine.contents import (
    Snapshot,
    buffered,
    pack,
    unbuffered,
    unpack,
)
from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.wire.codec import Codec
from lsgd_jax.asynchronous import (
    ADPSGD,
    LSGD,
    OSGP,
    DecoupledDiLoCo,
    DiLoCo,
    Network,
    Pairwise,
    Pulls,
    simulator,
)


NARROW = ["bfloat16", "int8", "int4"]
STOCHASTIC = [f"{format}-stochastic" for format in NARROW]


def normal(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def rounded(vector, format, *draw):
    return unpack(pack(vector, lj.Wire.of(format), *draw))


# Rounding


@pytest.mark.slow
@pytest.mark.parametrize("format", NARROW)
def test_a_vector_is_rounded_as_a_leaf_is_in_lock_step(format):
    vector, wire = normal(1000), lj.Wire(format)
    with on_one_device():
        codec = Codec(vector, wire)
    expected = codec.decode(codec.encode(jnp.asarray(vector)))
    np.testing.assert_allclose(rounded(vector, format), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("format", STOCHASTIC)
def test_draws_differ_by_turn_and_by_worker_and_repeat(format):
    vector = normal(600)
    drawn = lambda turn, index: rounded(vector, format, turn, index)
    np.testing.assert_array_equal(drawn(1, 0), drawn(1, 0))
    assert (drawn(1, 0) != drawn(2, 0)).any() and (drawn(1, 0) != drawn(1, 1)).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_arrives_exactly(value):
    vector = normal(600)
    vector[300] = value
    np.testing.assert_array_equal(rounded(vector, "int8"), vector)


def test_each_leaf_has_scales_of_its_own_and_single_numbers_travel_exactly():
    tree = {
        "a": normal(6),
        "b": 1e3 * normal(9),
        "c": np.float32([1 / 3]),
        "n": np.arange(2),
    }
    found = rounded(tree, "int4")
    for leaf, was in zip(jax.tree.leaves(found), jax.tree.leaves(tree)):
        assert abs(leaf - was).max() <= abs(was).max() / 14 * (was.size > 2)


def test_a_content_is_one_buffer_and_the_same_again():
    tree = {"a": np.ones(3, jnp.bfloat16), "b": np.float64(np.ones([2, 1]) / 3)}
    for content in (Snapshot(tree, 0.5), pack({"x": normal(9)}, lj.Wire("int8")), "gone"):
        again = unbuffered(pickle.loads(pickle.dumps(buffered(content))))
        assert jax.tree.structure(again) == jax.tree.structure(content)
        for leaf, was in zip(jax.tree.leaves(again), jax.tree.leaves(content)):
            np.testing.assert_array_equal(leaf, was)
            assert getattr(leaf, "dtype", None) == getattr(was, "dtype", None)


# Nothing is lost


STEPS = 64


def drifting(by):
    """The parameters of every worker fall by this much per step; two of them stay 1."""
    start = jnp.full([300], 0.5).at[jnp.array([0, 256])].set(1)
    return moving(start, lambda x, i: jnp.where(start < 1, -by, 0))


# Methods in lock step have these rounds, too: `test_pulls` compares them.
METHODS = {
    "local_sgd": lambda wire: Pulls(lj.local_sgd(4, wire=wire)),
    "async lsgd": functools.partial(LSGD, 0.1, 0.1, 4, 8),
    "adpsgd": ADPSGD,
    "async osgp": functools.partial(OSGP, lj.topology.ring),
    "pairwise": Pairwise,
    "async diloco": functools.partial(DiLoCo, 4, 0.25, 0.0, momentum_every=1),
    "async diloco, together": functools.partial(DiLoCo, 4, 1.0, 0.0, together=True),
    "decoupled diloco": functools.partial(DecoupledDiLoCo, 4, 1.0, 0.0, fragments=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("name", METHODS)
def test_small_steps_add_up_although_each_is_rounded(format, name):
    scale = 1 / {"int8": 127, "int4": 7}[format]
    training = drifting(scale / 16)

    def fallen(wire):
        method = METHODS[name](wire=wire)
        workers = simulator.run(training, method, 1, 4, steps=STEPS).workers
        found = np.stack([worker.vector() for worker in workers])
        np.testing.assert_allclose(found[:, 0], 1, rtol=1e-4)
        return (0.5 - found[:, 1:256].mean(1)) / scale

    assert (abs(fallen(format) - fallen("float32")) < 0.8).all()


@pytest.mark.slow
def test_the_simulator_counts_and_times_encoded_messages():
    link = Network(bandwidth=1e4, latency=0.0)
    full, narrow = (
        simulator.run(drifting(0.1), Pulls(lj.dpsgd(wire=wire)), 2, 2, 8, link)
        for wire in ("float32", "int8")
    )
    sent = lambda found: sum(w.transport.mailbox.bytes_sent for w in found.workers)
    assert 0.25 < sent(narrow) / sent(full) < 0.27
    assert narrow.seconds < 0.5 * full.seconds
