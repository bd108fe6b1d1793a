"""Formats of vectors: what rounding does, that nothing of it is lost, bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj
from lsgd_jax._src import wire as lock_step
from lsgd_jax._src.asynchronous.collective import all_reduce
from lsgd_jax._src.asynchronous.compression import BLOCK, Compression, aligned
from lsgd_jax._src.asynchronous.network import Network
from lsgd_jax._src.asynchronous.snapshot import Snapshot
from lsgd_jax._src.asynchronous.worker import Training
from lsgd_jax.asynchronous import (
    ADPSGD,
    LSGD,
    WAGMA,
    DiLoCo,
    Pairwise,
    Pulls,
    memory,
    simulator,
)


NARROW = ["bfloat16", "int8", "int4"]
STOCHASTIC = [f"{format}-stochastic" for format in NARROW]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def normal(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


# Rounding


@pytest.mark.parametrize("format", [*NARROW, *STOCHASTIC])
def test_what_is_rounded_stays_when_it_is_sent_again_whole_or_in_slices(format):
    wire = Compression(format)
    for size in (0, 2, 255, 256, 257, 10_001):
        for scale in (0, 1e-42, 1e-3, 1e37):
            once = wire.rounded(np.float32(scale) * normal(size), turn=size)
            np.testing.assert_array_equal(wire.rounded(once), once)
            parts = [wire.rounded(once[part]) for part in aligned(size, 3)]
            np.testing.assert_array_equal(np.concatenate(parts), once)


@pytest.mark.parametrize("format, levels", [("int8", 127), ("int4", 7)])
def test_it_is_rounded_to_nearest_as_in_lock_step(format, levels):
    vector = normal(1000)
    found = Compression(format).rounded(vector)
    coded = lock_step.encode(jnp.asarray(vector), lj.Wire(format))
    expected = lock_step.decode(coded, lj.Wire(format), (1000,))
    largest = [abs(vector[a : a + BLOCK]).max() for a in range(0, 1000, BLOCK)]
    steps = np.repeat(largest, BLOCK)[:1000] / levels
    assert (abs(found - vector) <= 0.5001 * steps).all()
    # Scales have fewer digits here; what lies between two steps may go the other way.
    same = abs(found - expected) <= 4e-5 * steps * levels
    assert same.mean() > 0.995 and (abs(found - expected) <= 1.001 * steps).all()


@pytest.mark.parametrize(
    "format, at_most", [("bfloat16", 0.5), ("int8", 0.27), ("int4", 0.14)]
)
def test_bytes(format, at_most):
    wire, vector = Compression(format), normal(BLOCK * 40 + 1)
    packed = wire.pack(vector)
    nbytes = sum(x.nbytes for x in packed if isinstance(x, np.ndarray))
    assert nbytes == wire.nbytes(vector.size) <= (at_most + 1e-3) * vector.nbytes


@pytest.mark.parametrize("format", [*NARROW, *STOCHASTIC])
def test_what_is_not_finite_arrives_as_not_finite(format):
    for value in (np.nan, np.inf, -np.inf):
        vector = normal(600)
        vector[300] = value
        found = Compression(format).rounded(vector)
        assert not np.isfinite(found[300])
        assert np.isfinite(found[:256]).all() and np.isfinite(found[512:]).all()


def test_single_numbers_and_what_is_no_vector_travel_as_they_are():
    wire, one = Compression("int4"), np.array([1 / 3], np.float32)
    assert wire.rounded(one) == one and wire.nbytes(1) == 4
    assert wire.arrived("gone") == "gone" and wire.arrived(None) is None
    snapshot = Snapshot(normal(9), 3, 0.1, 0.2)
    arrived = wire.arrived(snapshot)
    assert arrived[1:] == snapshot[1:] and (arrived.vector != snapshot.vector).any()


# Nothing is lost


@pytest.mark.parametrize("format", NARROW)
def test_sums_and_what_rounding_owes_make_what_should_have_been_sent(format):
    size, workers, times = 700, 3, 5
    held = memory.Memory(1, workers, steps=1, wire=format)
    errors = [np.zeros(size, np.float32) for _ in range(workers)]
    given = normal([times, workers, size])
    sums = np.zeros([times, workers, size], np.float32)

    async def add(i):
        for t in range(times):
            sums[t, i], count, came = await all_reduce(
                held.ports[i], t, given[t, i], True, range(workers), errors[i]
            )
            assert count == workers

    tasks = [held.start(add(i), i) for i in range(workers)]
    held.run()
    assert all(task.error is None for task in tasks)
    np.testing.assert_array_equal(sums, np.repeat(sums[:, :1], workers, axis=1))
    owed = sums[:, 0].sum(0) + sum(errors)
    np.testing.assert_allclose(owed, given.sum((0, 1)), atol=2e-5)
    assert abs(sums[0, 0] - given[0].sum(0)).max() > 1e-3  # it was rounded


STEPS = 64


def drifting(by):
    """Every worker's parameters fall by as much a step, but for two that stay 1."""
    start = jnp.full([300], 0.5).at[jnp.array([0, 256])].set(1)
    update = jnp.where(start < 1, -by, 0)

    @jax.jit
    def step(params, opt_state, own, t):
        return {"x": update}, opt_state, own, jnp.float32(1)

    return Training(lambda i: ({"x": start}, (), jnp.int32(i)), step)


METHODS = {
    "lsgd": Pulls(lj.lsgd(0.1, 0.1, 4, 8)),
    "local_sgd": Pulls(lj.local_sgd(4)),
    "local_sgd, budget": Pulls(lj.local_sgd(4), budget=True),
    "diloco": Pulls(lj.diloco(4, outer=optax.sgd(1.0))),
    "dpsgd": Pulls(lj.dpsgd(lj.topology.ring(4))),
    "sgp": Pulls(lj.sgp()),
    "async lsgd": LSGD(0.1, 0.1, 4, 8),
    "adpsgd": ADPSGD(),
    "pairwise": Pairwise(),
    "wagma": WAGMA(group_size=2, sync_period=8),
    "async diloco": DiLoCo(4, learning_rate=0.25, momentum=0.0, momentum_every=1),
    "async diloco, together": DiLoCo(4, 1.0, 0.0, together=True),
}


OFTEN = ["local_sgd", "adpsgd", "async diloco"]


@pytest.mark.parametrize("format", ["int8", slow("int4")])
@pytest.mark.parametrize("name", [m if m in OFTEN else slow(m) for m in METHODS])
def test_small_steps_add_up_whatever_rounding_takes_of_each(format, name):
    scale = 1 / {"int8": 127, "int4": 7}[format]
    training = drifting(scale / 16)

    def fallen(wire):
        workers = memory.run(training, METHODS[name], 1, 4, steps=STEPS, wire=wire)
        found = np.stack([worker.vector() for worker in workers])
        np.testing.assert_allclose(found[:, 0], 1, rtol=1e-4)
        return (0.5 - found[:, 1:256].mean(1)) / scale

    wire = f"{format}-stochastic" if name == "wagma" else format
    assert (abs(fallen(wire) - fallen("float32")) < 0.8).all()


def test_to_nearest_is_refused_where_small_steps_would_get_lost():
    with pytest.raises(ValueError, match="round at random for WAGMA.*'int8-stochastic'"):
        memory.run(drifting(0.1), METHODS["wagma"], 1, 2, steps=1, wire="int8")


@pytest.mark.parametrize("name", ["dpsgd", slow("sgp"), slow("async diloco")])
def test_the_simulator_counts_and_times_what_travels(name):
    link = Network(bandwidth=1e4, latency=0.0)
    full, narrow = (
        simulator.run(drifting(0.1), METHODS[name], 2, 2, 8, link, wire=wire)
        for wire in ("float32", "int8")
    )
    sent = lambda found: sum(w.ports.mailbox.bytes_sent for w in found.workers)
    assert 0.25 < sent(narrow) / sent(full) < 0.27
    assert narrow.seconds < 0.5 * full.seconds
