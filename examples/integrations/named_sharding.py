"""`jax.jit` with `NamedSharding`s: a mesh of the axes `data`, `fsdp` and `tensor`.

Two workers along `data`, each sharded over the other axes, of which `tensor` has size 1 and
then 2. With plain SGD the program, which shards the batch over `data`, equals `allreduce`
and local SGD of period 1. DiLoCo equals DiLoCo on workers that are not sharded. Tested with
jax 0.10.2 and 0.12.0.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from own_loop import batches_of, compare, train

import lsgd_jax as lj


def loss_of(params, batch):
    x, y, *_ = batch
    return jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] - y).mean()


def create(tx):
    keys = jax.random.split(jax.random.key(0))
    sizes = {"in": (4, 32), "out": (32, 1)}
    params = {name: jax.random.normal(k, sizes[name]) / 4 for name, k in zip(sizes, keys)}
    return {"params": params, "opt_state": tx.init(params)}


def step_of(tx):
    def update(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    return update


def their_program(tx, state, shardings, rows, batches):
    state = jax.device_put(state, shardings)
    step = jax.jit(step_of(tx), in_shardings=(shardings, rows), donate_argnums=0)
    for batch in batches:
        state, metrics = step(state, jax.tree.map(jnp.concatenate, batch))
    return state["params"]


def ours(tx, method, state, shardings, mesh, batches):
    workers = lj.Workers(mesh=mesh, axes="data")  # new
    step = lj.around(step_of(tx), method)  # new
    state = workers.map(step.init)(workers.replicate(state, shardings))  # new
    step = workers.map(step, donate=0)  # new, in place of jax.jit
    for batch in batches:
        state, metrics = step(state, workers.put(batch))  # new: put
    return state.state["params"]


def shardings_of(state, mesh):
    """Shards both matrices, and their moments, over `fsdp` and `tensor`."""
    specs = {(4, 32): P("fsdp", "tensor"), (32, 1): P(("tensor", "fsdp"))}
    lies = lambda x: NamedSharding(mesh, specs.get(jnp.shape(x), P()))
    return jax.tree.map(lies, state)


def run(steps, tensor):
    sgd, adam, method = optax.sgd(0.1), optax.adam(1e-2), lj.diloco(4)
    batches = [(x, y) for x, y, _ in batches_of(steps, 2)]
    axes, types = ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 4 // tensor, tensor), axes, axis_types=types)
    rows = NamedSharding(mesh, P("data"))

    state = create(sgd)
    theirs = their_program(sgd, state, shardings_of(state, mesh), rows, batches)
    for name, tx, around in (
        ("allreduce", optax.chain(lj.allreduce(), sgd), lj.exchange()),
        ("local SGD", sgd, lj.local_sgd(1)),
    ):
        state = create(tx)
        found = ours(tx, around, state, shardings_of(state, mesh), mesh, batches)
        compare(name, jax.tree.map(lambda x: x[0], found), theirs)
    state = create(adam)
    found = ours(adam, method, state, shardings_of(state, mesh), mesh, batches)
    whole = lj.Workers(mesh=mesh, axes="data")  # whose parameters are not sharded
    expected = train(loss_of, state["params"], adam, method, whole, batches)
    compare(f"DiLoCo, tensor={tensor}", found, expected)


def main(steps: int = 20):
    for tensor in (1, 2):
        run(steps, tensor)


if __name__ == "__main__":
    lj.emulate_devices(8)
    main()
