"""Flax NNX: a model with dropout and its `nnx.Optimizer`, both replicated by `nnx.vmap`.

Two replicas with different dropout masks. Tested with flax 0.12.8 and jax 0.10.2.
"""

import jax.numpy as jnp
import optax
from flax import nnx
from own_loop import batches_of, compare, train

import lsgd_jax as lj


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(4, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x, key):
        return self.out(self.dropout(nnx.relu(self.hidden(x)), rngs=key))


def loss_of(model, batch):
    x, y, key = batch
    return jnp.square(model(x, key) - y).mean()


def main(steps: int = 40):
    base, o, batches = optax.adam(1e-2), lj.outer(lj.diloco(8)), batches_of(steps, 2)

    @nnx.vmap(axis_size=2, axis_name="node")
    def start():
        model = Network(nnx.Rngs(0))
        params = nnx.state(model, nnx.Param)
        return model, nnx.Optimizer(model, base, wrt=nnx.Param), o.init(params)

    @nnx.jit
    @nnx.vmap(axis_name="node")
    def step(model, optimizer, state, batch):  # of one replica
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        params, state = o.step(nnx.state(model, nnx.Param), state, loss=loss)
        nnx.update(model, params)
        return state

    model, optimizer, state = start()
    for batch in batches:
        state = step(model, optimizer, state, batch)

    graph, params = nnx.split(Network(nnx.Rngs(0)))
    loss_alone = lambda params, batch: loss_of(nnx.merge(graph, params), batch)
    own = train(loss_alone, params, base, o.method, lj.Workers(nodes=2, locals=1), batches)
    compare("Flax NNX", nnx.state(model, nnx.Param), own)


if __name__ == "__main__":
    lj.emulate_devices(2)
    main()
