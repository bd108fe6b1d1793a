"""Flax linen with logical axes, whose shardings a program reads from its abstract state.

Two workers along `data`, each sharded over `fsdp` and `tensor`. With plain SGD the program,
which shards the batch over `data`, equals local SGD of period 1. LSGD equals LSGD on
workers that are not sharded. Tested with flax 0.12.8 and jax 0.10.2.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from own_loop import batches_of, compare, train

import lsgd_jax as lj


RULES = (("embed", "fsdp"), ("mlp", "tensor"), ("one", None))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = nn.initializers.lecun_normal()
        rows = nn.with_logical_partitioning(kernel, ("embed", "mlp"))
        x = nn.tanh(nn.Dense(32, kernel_init=rows)(x))
        return nn.Dense(
            1, kernel_init=nn.with_logical_partitioning(kernel, ("mlp", "one"))
        )(x)


def loss_of(params, batch):
    x, y, *_ = batch
    return jnp.square(Network().apply({"params": params}, x) - y).mean()


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}


def create(tx, mesh):
    """Returns a TrainState without boxes, and its shardings."""

    def init():
        params = Network().init(jax.random.key(0), jnp.ones([1, 4]))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    logical = nn.get_partition_spec(jax.eval_shape(init))
    shardings = nn.logical_to_mesh_sharding(logical, mesh, RULES)
    return nn.meta.unbox(init()), shardings


def their_program(tx, mesh, batches):
    state, shardings = create(tx, mesh)
    state, rows = jax.device_put(state, shardings), NamedSharding(mesh, P("data"))
    lies = dict(in_shardings=(shardings, rows), out_shardings=(shardings, None))
    step = jax.jit(train_step, **lies, donate_argnums=0)
    for batch in batches:
        state, metrics = step(state, jax.tree.map(jnp.concatenate, batch))
    return state.params


def ours(tx, method, mesh, batches):
    workers, step = lj.Workers(mesh=mesh, axes="data"), lj.around(train_step, method)  # new
    state = workers.replicate(*create(tx, mesh))  # new
    state = workers.map(step.init)(state)  # new
    step = workers.map(step, donate=0)  # new, in place of jax.jit
    for batch in batches:
        state, metrics = step(state, workers.put(batch))  # new: put
    return state.state.params


def main(steps: int = 20):
    batches = [(x, y) for x, y, _ in batches_of(steps, 2)]
    axes, types = ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=types)
    sgd, adam = optax.sgd(0.1), optax.adam(1e-2)

    found = ours(sgd, lj.local_sgd(1), mesh, batches)
    theirs = their_program(sgd, mesh, batches)
    compare("local SGD", jax.tree.map(lambda x: x[0], found), theirs)

    method = lj.lsgd(0.3, 0.2, local_period=2, global_period=4)
    start, whole = create(adam, mesh)[0].params, lj.Workers(mesh=mesh, axes="data")
    expected = train(loss_of, start, adam, method, whole, batches)
    compare("LSGD", ours(adam, method, mesh, batches), expected)


if __name__ == "__main__":
    lj.emulate_devices(8)
    main()
