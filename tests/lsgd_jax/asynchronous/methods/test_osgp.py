"""Overlap SGP and D-PSGD among asynchronous workers: as in lock step, beside the steps."""

import jax
import numpy as np
import pytest
import toys

import lsgd_jax as lj
from lsgd_jax import topology as graph
from lsgd_jax._src.asynchronous.methods.osgp import OSGPWorker
from lsgd_jax._src.asynchronous.simulated.simulator import Simulation
from lsgd_jax.asynchronous import LSGD, OSGP, Network, Pulls, Speeds, simulator


DIRECTED = graph.from_edges([[(0, 1), (0, 2), (1, 2), (2, 3), (3, 0)]])
STAR = graph.metropolis([(0, 1), (0, 2), (0, 3)])
TURNS = graph.from_edges([[(0, 1), (0, 2), (2, 3)], [(1, 0), (3, 2), (3, 1)]])


@pytest.mark.parametrize(
    "method, in_lock_step, workers, latency",
    [
        toys.slow(OSGP(), lj.osgp(), 4, 0),
        toys.slow(OSGP(graph.ring), lj.dpsgd(graph.ring), 3, 0),
        toys.slow(OSGP(STAR), lj.dpsgd(STAR), 4, 0.4),
        toys.slow(OSGP(DIRECTED), lj.osgp(DIRECTED), 4, 0),
        toys.slow(OSGP(TURNS), lj.osgp(TURNS), 4, 0),
        # Messages of 1.5 steps land one step later.
        toys.slow(OSGP(staleness=2), lj.osgp(staleness=2), 4, 0.75),
        (OSGP(STAR, staleness=4), lj.osgp(STAR, staleness=4), 4, 1.75),
    ],
    ids=["sgp", "ring", "star", "directed", "rounds", "stale", "stale-star"],
)
def test_it_equals_lock_step(method, in_lock_step, workers, latency):
    note, seen = toys.noting(lambda worker: worker.vector())
    toys.simulate(toys.training(), method, 1, workers, 10, latency=latency, observe=note)
    expected = toys.in_lock_step(in_lock_step, 1, workers, 10)
    last = np.stack([seen[i][-1] for i in range(workers)])
    np.testing.assert_allclose(last, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_messages_travel_beside_the_steps():
    link = Network(bandwidth=1e4, latency=0.0)
    message = toys.simulate(toys.training(), OSGP(), 1, 1, 1)[0].vector().nbytes
    speeds = Speeds(2 * message / 1e4)  # of a step; a message takes at most a half of it

    def seconds(method):
        return simulator.run(toys.training(), method, 4, 1, 8, link, speeds).seconds

    alone = seconds(LSGD(0.0, 0.0))
    assert seconds(OSGP()) < 1.1 * alone < 1.4 * alone < seconds(Pulls(lj.osgp()))


@pytest.mark.parametrize(
    "topology, staleness, wire",
    [
        toys.slow(graph.exponential, 1, "float32"),
        (DIRECTED, 3, "int8"),
        toys.slow(graph.exponential, 1, "int8"),
        toys.slow(DIRECTED, 3, "float32"),
    ],
)
def test_nothing_is_lost_and_neighbors_stay_together(
    topology, staleness, wire, monkeypatch
):
    """Workers that take no steps of their own find the mean of their starts."""
    monkeypatch.setattr("zlib.crc32", lambda data: 0)  # so that they may start apart
    counts = np.zeros(4, int)
    moved_by_loans = []
    settle = OSGPWorker._settle

    def noted(method):
        sums = [method.weight * toys.position(method.worker)]
        settle(method)
        sums.append(method.weight * toys.position(method.worker))
        moved_by_loans.append(sums[1] - sums[0])

    monkeypatch.setattr(OSGPWorker, "_settle", noted)

    def note(worker):
        counts[worker.index] = worker.count
        if topology is graph.exponential:  # in two rounds a worker has heard of all others
            assert np.ptp(counts) <= 2 * staleness + 1

    method, seconds = OSGP(topology, staleness, wire=wire), [1, 1.1, 1.3, 3]
    workers = toys.simulate(
        toys.resting(), method, 1, 4, 60, seconds, latency=0.3, observe=note
    )
    weights = np.array([worker.method.weight for worker in workers])
    x = np.array([toys.position(worker) for worker in workers])
    loans = sum(worker.method._lent for worker in workers)
    np.testing.assert_allclose(weights.sum(), 4 + loans, rtol=1e-6)
    total = 0 + 1 + 2 + 3 + sum(moved_by_loans)
    np.testing.assert_allclose(weights @ x, total, rtol=1e-5)
    assert (staleness == 1) == (total == 6)
    np.testing.assert_allclose(
        x, total / (4 + loans), rtol=1e-3 if wire == "float32" else 0.03
    )


def test_late_neighbors_neither_speed_a_worker_up_nor_are_forgotten():
    """They are more than 16 steps late, the number of messages that any mailbox keeps."""
    falling = toys.moving(toys.start(), lambda x, i: jax.tree.map(lambda x: 0 * x - 1, x))
    note, seen = toys.noting(lambda worker: (worker.method.weight, toys.position(worker)))
    method, seconds = OSGP(staleness=24), [1, 1, 1, 8]
    workers = toys.simulate(falling, method, 1, 4, 40, seconds, observe=note, timeout=99)
    for worker in workers:
        weights, places = np.transpose(seen[worker.index])
        np.testing.assert_allclose(weights, 1, rtol=1e-5)
        assert len(places) == 40 and np.abs(np.diff(places, prepend=0)).max() < 3
        assert worker.report.longest < 99  # it waits for the slow worker, and no timeout


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_a_failed_worker_is_left_out_and_takes_over_when_it_restarts(wire):
    options = dict(timeout=2.0, drops={1: 10.5}, seconds=[1, 1.1, 1.2, 1.3])
    method = OSGP(graph.ring, wire=wire)
    rest = toys.simulate(toys.training(), method, 1, 4, 100, **options)
    rest = [worker for worker in rest if worker.index != 1]
    assert [worker.count for worker in rest] == [100] * 3
    for worker in rest:  # it waits once, and in every step for the slowest of them
        behind = 1.3 - options["seconds"][worker.index]
        assert worker.report.waited < 100 * behind + 2.0
    np.testing.assert_allclose([worker.method.weight for worker in rest], 1, rtol=0.1)

    note, seen = toys.noting(toys.clock)
    workers = toys.simulate(
        toys.training(), method, 1, 4, 60, joins={1: 30.0}, observe=note, **options
    )
    after = [count for now, count in seen[1] if now > 30]
    assert after[0] > 11 and after[-1] == 60
    assert np.isfinite(toys.stacked(workers)).all()
    assert max(worker.report.longest for worker in workers) <= 2 * 2.0 + 0.1


def test_it_resumes_as_if_it_had_not_stopped(monkeypatch):
    """The states of all workers at one step are all that the next steps depend on."""
    seen, states = {}, {}

    def note(worker):
        if worker.count == 6:
            worker.keep()
            states[worker.index] = worker.state(own=True)
        seen[worker.index, worker.count] = worker.vector()

    run = lambda: toys.simulate(toys.training(), OSGP(DIRECTED), 1, 4, 12, observe=note)
    run()
    whole, enter = dict(seen), Simulation.enter
    seen.clear()

    def from_state(simulation, training, i):
        worker = enter(simulation, training, i)
        worker.take_over(states[i])
        return worker

    monkeypatch.setattr(Simulation, "enter", from_state)
    run()
    assert len(seen) == 4 * 6
    for key, vector in seen.items():
        np.testing.assert_array_equal(vector, whole[key])
