"""members: a loop whose processes may be lost, while none is; and what is refused."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coordination import World
from loops import begun, start, state_in, targets_of, update

import lsgd_jax as lj
from lsgd_jax._src.workers import transfer, twin
from lsgd_jax._src.workers.members import Members, check_may_lose


WORKERS = lj.Workers(2, 2, devices=jax.devices()[:4])


@pytest.fixture
def alone(monkeypatch):
    """This process is the only one of jax.distributed."""

    def of_jax():
        return Members(World(1).start(0), me=0, processes=1)

    monkeypatch.setattr(Members, "of_jax", of_jax)


def test_without_a_loss_numbers_are_those_of_any_loop_beside(alone):
    train = lj.around(update, lj.diloco(4, delay=2, wire="int8"))
    workers = lj.Workers(2, 2, devices=jax.devices()[:1])
    other_workers = lj.Workers(2, 2, devices=jax.devices()[:1])
    run = workers.loop(train, donate=0, beside=True, min_workers=2)
    other = other_workers.loop(train, donate=0, beside=True)
    state = run.begin(begun(train, workers, start))
    expected = begun(train, other_workers, start)
    for t, target in enumerate(targets_of(4), start=1):
        results = run(state, workers.put(target))
        state = state_in(results)
        expected = state_in(other(expected, other_workers.put(target)))
        jax.tree.map(np.testing.assert_array_equal, run.settled(state), expected)
        assert (run.steps, run.num_workers) == (t, 4)
    mean = run.consensus(state.state)
    jax.tree.map(
        np.testing.assert_allclose, mean, other_workers.fetch(lj.consensus(expected.state))
    )
    for x, y in zip(*map(jax.tree.leaves, workers.fetch((state.state, expected.state)))):
        np.testing.assert_array_equal(x, y)
    run.close()


def test_fetch_takes_small_arrays_alone():
    own = jnp.arange(6.0).reshape(3, 2)
    said = []

    def gather(value):
        said.append(value)
        return [value, [[[8.0, 9.0]], 7]]  # another process has one worker

    found, step = transfer.of_members(gather, (own, lj.Shared(jnp.int32(7))))
    assert found.tolist() == [[0, 1], [2, 3], [4, 5], [8, 9]]
    assert step.value == 7 and said == [[own.tolist(), 7]]
    with pytest.raises(ValueError, match="must have small arrays"):
        transfer.of_members(gather, np.zeros(2**16 + 1))


class Device:
    """A CPU device of a process."""

    platform = "cpu"

    def __init__(self, process, number):
        self.process_index = process
        self.number = number


def test_each_turn_has_other_partners(monkeypatch):
    """Three processes with two devices that train, and six beside them."""
    devices = {(p, n): Device(p, n) for p in range(3) for n in range(8)}
    monkeypatch.setattr(jax, "devices", lambda platform=None: list(devices.values()))
    training = np.array([[devices[p, 0], devices[p, 1]] for p in range(3)], object)
    seen = []
    for turn in range(3**3):
        found = twin.partners(training, turn)
        assert all(a.process_index == b.process_index for a, b in found.items())
        seen.append(tuple(found[device].number for device in training.flat))
    assert len(set(seen)) == 27 == twin.turns(training)
    for numbers, after in zip(seen, seen[1:]):
        assert all(a != b for a, b in zip(numbers, after))
    assert {n for each in seen for n in each} == set(range(2, 8))
    assert twin.turns(training[:2]) == 9
    assert twin.turns(training[1:2]) == np.inf


@pytest.mark.parametrize(
    "processes, live, nodes, locals",
    [
        ([[0, 0], [1, 1], [2, 2]], {0, 2}, 2, 2),
        ([[0, 0, 1, 1, 2]], {1, 2}, 1, 3),
        ([[0, 1], [2, 3]], {0, 1}, 1, 2),
        ([[0, 1], [2, 3]], {0, 2}, 2, 1),
        ([[0, 1], [2, 3]], {0, 1, 2}, None, None),
    ],
)
@pytest.mark.parametrize("name", ["node", "node_device"])
def test_workers_that_live_are_a_grid(processes, live, nodes, locals, name, monkeypatch):
    devices = np.vectorize(lambda process: Device(process, 0))(processes)

    def mesh_of(devices, names, axis_types=None):
        return SimpleNamespace(devices=devices, axis_names=names, axis_types=axis_types)

    monkeypatch.setattr(twin, "Mesh", mesh_of)
    shape = dict(zip(("nodes", "locals"), devices.shape))
    mesh = mesh_of(devices, (name, "local"))
    grid = WORKERS._grid._replace(mesh=mesh, axes=mesh.axis_names, **shape)
    if nodes is None:
        with pytest.raises(ValueError, match="must be whole nodes"):
            twin.among(grid, live)
        return
    found = twin.among(grid, live)
    assert (found.nodes, found.locals) == found.mesh.devices.shape == (nodes, locals)
    assert {device.process_index for device in found.mesh.devices.flat} == live


def test_a_process_trains_on_one_device():
    with pytest.raises(ValueError, match="one device, got 4 devices in 1 processes"):
        check_may_lose([], WORKERS._grid)


def method_of(method):
    return lj.around(update, method).methods[0].method


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: lj.local_sgd(4), "all messages between processes have a `delay`"),
        (lambda: lj.exchange(lj.Pull(lj.rules.average(), 1.0, 4)), "`delay`"),
    ],
)
def test_messages_of_lost_processes_have_a_delay(make, says, monkeypatch):
    own = lj.Workers(1, 2, devices=jax.devices()[:1])._grid
    connects = "lsgd_jax._src.workers.members._connects_processes"
    monkeypatch.setattr(connects, lambda axes, grid: True)
    with pytest.raises(ValueError, match=says):
        check_may_lose([method_of(make())], own)
    check_may_lose([method_of(lj.local_sgd(4, delay=1))], own)


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(min_workers=0, beside=True), "`min_workers` must be a positive int"),
        (dict(min_workers=5, beside=True), "at most the number of workers, 4"),
        (dict(min_workers=2), "unless messages travel beside"),
        (dict(min_workers=2, beside=True), "jax_enable_recoverability"),
    ],
)
def test_wrong_numbers_of_workers_are_refused(options, says):
    train = lj.around(update, lj.local_sgd(4, delay=1))
    workers = lj.Workers(2, 2, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=says):
        workers.loop(train, **options)


def test_consensus_is_for_processes_that_may_be_lost():
    train = lj.around(update, lj.local_sgd(4, delay=1))
    run = WORKERS.loop(train, beside=True)
    with pytest.raises(ValueError, match="call `lj.consensus`"):
        run.consensus(jnp.ones(4))
    assert run.num_workers is None
