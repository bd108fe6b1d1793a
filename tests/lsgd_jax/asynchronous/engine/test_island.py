"""Islands: the numbers of workers of one device, in shards that no exchange changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from toys import FREE_RUNNING as METHODS

import lsgd_jax as lj
from lsgd_jax._src.asynchronous.engine.sharding import on_cpu, placed_like
from lsgd_jax.asynchronous import OSGP, Pulls, Training, island


SPECS = {"w": P(None, "fsdp"), "b": P("fsdp")}
NARROW = dataclasses.replace(METHODS["lsgd"], wire="int8-stochastic")
PULLS = {
    "pulls": Pulls(lj.lsgd(local_period=2, global_period=4), budget=True),
    "pulls-int8": Pulls(lj.diloco(4, wire="int8")),
    "pulls-streaming": Pulls(lj.diloco(4, fragments=2, delay=1, memory="host")),
    "pulls-top-k": Pulls(lj.contrib.sparse_diloco(4)),
    "pulls-pairs": Pulls(lj.dpsgd()),
    "osgp": OSGP(),
}
ALL = METHODS | {"lsgd-int8": NARROW} | PULLS
# By default snapshots and the kernel's rules.
QUICK = ["lsgd"]


def mesh_of(first=0, count=2):
    return Mesh(np.array(jax.devices()[first : first + count]), "fsdp")


def simulated(training, method):
    """Worker 1 is restarted, and an update of worker 2 is not finite."""
    task = toys.broken(training, 2, steps=[7])
    seconds, failures = [1, 1.1, 1.2, 1.3], dict(drops={1: 5.5}, joins={1: 9.5})
    return toys.simulate(task, method, 1, 4, 16, seconds, timeout=2.0, **failures)


def check_shards(tree):
    """Every leaf like a parameter lies in halves, of which a device has one."""
    halves = {(3, 2): (3, 1), (4,): (2,)}
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    found = [x for x in leaves if x.shape in halves]
    for x in found:
        assert [s.data.shape for s in x.addressable_shards] == [halves[x.shape]] * 2
    return len(found)


@pytest.mark.parametrize("name", [n if n in QUICK else toys.slow(n) for n in ALL])
def test_islands_compute_the_same_and_stay_sharded(name):
    expected = simulated(toys.training(), ALL[name])
    workers = simulated(island(toys.training(), mesh_of(), SPECS), ALL[name])
    assert np.isfinite(toys.stacked(expected)).all()
    found, wanted = toys.stacked(workers), toys.stacked(expected)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    for worker, other in zip(workers, expected):
        assert worker.count == other.count
        assert worker.report.bytes_sent == other.report.bytes_sent
        assert check_shards((worker.params, worker.x, worker.opt_state)) == 6
        arrived = jax.device_get(worker.params)
        assert check_shards(placed_like(worker.params, arrived)) == 2
        assert check_shards(worker.sharding.put(worker.on_host())) == 2
        check_shards(worker.method.state())
    with on_cpu(workers[0].sharding):
        assert jnp.zeros([]).devices() == {jax.local_devices(backend="cpu")[0]}


@pytest.mark.slow  # `test_islands_compute_the_same_and_stay_sharded` has equal ones
@pytest.mark.parametrize("name", ["lsgd", "pulls-int8"])
def test_islands_of_several_sizes_on_their_own_devices_train_together(name):
    """Placed by jax itself; worker 3 is on one device."""
    task = toys.training()
    meshes = [mesh_of(0), mesh_of(2), mesh_of(4, 4), mesh_of(1, 1)]
    specs = {"w": P(), "b": P("fsdp")}
    init = lambda i: island(task, meshes[i], specs).init(i)
    workers = simulated(Training(init, task.step), ALL[name])
    wanted = toys.stacked(simulated(task, ALL[name]))
    np.testing.assert_allclose(toys.stacked(workers), wanted, rtol=1e-5, atol=1e-6)
    for worker, mesh in zip(workers, meshes):
        assert worker.params["b"].sharding.device_set == set(mesh.devices.flat)
        assert len(worker.params["b"].addressable_shards) == mesh.size


def test_nothing_is_compiled_after_the_first_exchange(caplog):
    task, method = island(toys.training(), mesh_of(), SPECS), METHODS["pairwise"]
    toys.simulate(task, method, 1, 2, 3)
    with jax.log_compiles():
        toys.simulate(task, method, 1, 2, 12)
    assert not [r for r in caplog.records if "Finished XLA compilation" in r.message]


def test_the_step_sees_the_axes_and_the_own_state_is_on_all_devices():
    seen = []

    @jax.jit
    def step(x, s, key, t):
        seen.append(lj.layouts.inside_axes())
        noise = jax.random.normal(jax.random.fold_in(key, t), x.shape)
        if lj.layouts.inside_axes():
            noise = jax.lax.with_sharding_constraint(noise, P("fsdp"))
        return noise - x, s, key, jnp.sum(x)

    task = Training(lambda i: (jnp.ones(8), (), jax.random.key(i)), step)
    method = METHODS["pairwise"]
    workers = toys.simulate(island(task, mesh_of(count=4), P("fsdp")), method, 1, 2, 4)
    wanted = toys.stacked(toys.simulate(task, method, 1, 2, 4))
    np.testing.assert_allclose(toys.stacked(workers), wanted, rtol=1e-5, atol=1e-6)
    assert seen[0] == ("fsdp",)
    kept = workers[0].state(own=True)
    workers[1].take_over(kept)
    assert workers[1].own.sharding.device_set == set(jax.devices()[:4])
    assert workers[1].params.addressable_shards[0].data.shape == (2,)


def test_meshes_and_specs_that_are_refused():
    explicit = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="'fsdp' is Explicit: use `jax.make_mesh"):
        island(toys.training(), explicit, SPECS)
    with pytest.raises(ValueError, match=r"the spec of the leaf \['w'\], \(3, 2\)"):
        island(toys.training(), mesh_of(), P("fsdp")).init(0)
    task = toys.training()
    parts = [island(task, mesh_of(i), SPECS).init(0)[0] for i in (0, 2)]
    apart = {"w": parts[0]["w"], "b": parts[1]["b"]}
    two = Training(lambda i: (apart, *task.init(i)[1:]), task.step)
    with pytest.raises(ValueError, match="must have a NamedSharding on one mesh"):
        toys.simulate(two, METHODS["lsgd"], 1, 2, 1)
