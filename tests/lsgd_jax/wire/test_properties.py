"""Properties of the codec, the edge coloring and the coordinator, by hypothesis."""

import collections
import contextlib
import functools

import jax
import numpy as np
import pytest
from harness import mostly_slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import lsgd_jax as lj
from lsgd_jax._src.asynchronous.engine.coordinator import Coordinator
from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.wire.codec import Codec


few = settings(
    max_examples=40,
    deadline=None,  # the first example of a shape compiles
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
floats = st.floats(-1e4, 1e4, width=32) | st.sampled_from([np.nan, np.inf, -np.inf, 0.0])
trees = st.tuples(
    *(arrays.arrays(np.float32, shape, elements=floats) for shape in [(7,), (3, 5), (1,)])
)
LEVELS = {"int8": 127, "int4": 7}
SUBNORMAL = 127 * float(np.finfo(np.float32).tiny)  # a smaller scale counts as 0


# The codec


@functools.cache
def round_trip(wire, keeps_shapes=False):
    """Returns tree -> (decoded, error), which a format compiles once."""

    @jax.jit
    def coded(tree):
        codec = Codec(tree, lj.Wire(wire, block=4))
        message = codec.encode(tree)
        return codec.decode(message), codec.error(tree, message)

    def on_device(tree):
        with contextlib.nullcontext() if keeps_shapes else on_one_device():
            return coded(tree)

    return on_device


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["int8", "int4"])
@given(tree=trees)
@few
def test_the_error_of_an_element_is_at_most_half_a_scale(wire, tree):
    arrived, _ = round_trip(wire)(tree)
    for x, q in zip(tree[:2], arrived):
        flat, got = np.where(np.isfinite(x), x, 0).ravel(), np.ravel(q)
        for start in range(0, flat.size, 4):
            block = slice(start, start + 4)
            scale = np.abs(flat[block]).max() / LEVELS[wire]
            assert (
                np.abs(got[block] - flat[block]).max() <= scale * (0.5 + 1e-5) + SUBNORMAL
            )
    np.testing.assert_array_equal(arrived[2], tree[2])  # one element is not rounded


@pytest.mark.parametrize("keeps_shapes", [False, True])
@pytest.mark.parametrize(
    "wire", mostly_slow(["bfloat16", "int8", "int4"], fast=["bfloat16", "int4"])
)
@given(tree=trees)
@few
def test_the_error_is_the_difference_to_the_decoded_message(keeps_shapes, wire, tree):
    """Also for leaves that keep their shape because they may be sharded."""
    tree = jax.tree.map(lambda x: np.where(np.isfinite(x), x, 1), tree)
    arrived, error = round_trip(wire, keeps_shapes)(tree)
    for x, q, e in zip(tree, arrived, error):
        np.testing.assert_allclose(np.asarray(q) + np.asarray(e), x, rtol=1e-5, atol=1e-3)
        largest = np.abs(x).max(initial=0)
        off = largest / 2 / LEVELS[wire] if wire in LEVELS else largest / 2**8
        assert np.abs(e).max(initial=0) <= off * (1 + 1e-4) + SUBNORMAL


# The coloring


@st.composite
def edges(draw, most=7):
    """Draws a number of workers, and edges between them."""
    workers = draw(st.integers(2, most))
    pairs = [(i, j) for i in range(workers) for j in range(workers) if i != j]
    return workers, draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True))


@given(graph=edges())
@few
def test_as_many_colors_as_the_degree_each_a_partial_permutation(graph):
    workers, given_edges = graph
    (round,) = lj.topology.from_edges([given_edges], num_workers=workers).rounds
    degrees = collections.Counter()
    for source, destination in given_edges:
        degrees["from", source] += 1
        degrees["to", destination] += 1
    assert len(round) == max(degrees.values(), default=0)
    assert sorted(edge for color in round for edge in color) == sorted(given_edges)
    for color in round:
        for ends in zip(*color):
            assert len(set(ends)) == len(ends)


# The coordinator


@given(
    workers=st.integers(1, 4),
    steps=st.integers(1, 6),
    period=st.none() | st.integers(1, 3),
    turns=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60),
)
@few
def test_no_step_is_granted_twice_or_beyond_the_end(workers, steps, period, turns):
    """Workers claim their next step, or their last one again, in any order."""
    coordinator = Coordinator(workers, steps, period)
    for i in range(workers):
        coordinator.enter(i, 0)
    taken, joined = [0] * workers, set()
    for i, again in turns:
        i %= workers
        if i in joined:
            continue
        claim = coordinator.claim(i, max(1, taken[i] + (not again)))
        if claim.go == "join":
            joined.add(i)
            coordinator.arrive(("join", claim.number), i, i, range(workers))
        elif claim.go == "step":
            taken[i] = max(taken[i] + (not again), 1)
        if joined == set(range(workers)):
            assert coordinator.number == claim.number + 1
            joined.clear()
        assert coordinator.taken == sum(taken) <= workers * steps
