"""Flax NNX: a model with dropout and its `nnx.Optimizer`, in two forms.

Two replicas with different dropout masks. Under `nnx.vmap` the method stands in the chain
of the optimizer, whose `update` passes the loss on. On `Workers` it is around a step whose
state is that of `nnx.split`. Tested with flax 0.12.8 and jax 0.10.2.
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


def in_the_optimizer(base, method, batches):
    tx = optax.chain(base, method)  # new

    @nnx.vmap(axis_size=2, axis_name="node")  # new
    def start():
        model = Network(nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    @nnx.vmap(axis_name="node")  # new
    def step(model, optimizer, batch):  # of one replica
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads, loss=loss)  # new: loss

    model, optimizer = start()
    for batch in batches:
        step(model, optimizer, batch)
    return nnx.state(model, nnx.Param)


def around_the_step(base, method, batches):
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, base, wrt=nnx.Param)
    graph, *state = nnx.split((model, optimizer), nnx.Param, ...)

    def update(state, batch):
        model, optimizer = nnx.merge(graph, *state)
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        _, *state = nnx.split((model, optimizer), nnx.Param, ...)
        return state, loss

    workers = lj.Workers(nodes=2, locals=1)  # new
    step = lj.around(update, method, params=0)  # new
    state = workers.map(step.init)(workers.replicate(state))  # new
    step = workers.map(step, donate=0)  # new, in place of jax.jit
    for batch in batches:
        state, loss = step(state, workers.put(batch))  # new: put
    return state.state[0][0]


def main(steps: int = 40):
    base, method, batches = optax.adam(1e-2), lj.diloco(8), batches_of(steps, 2)
    graph, params = nnx.split(Network(nnx.Rngs(0)))
    loss_alone = lambda params, batch: loss_of(nnx.merge(graph, params), batch)
    own = train(loss_alone, params, base, method, lj.Workers(nodes=2, locals=1), batches)
    compare("Flax NNX", in_the_optimizer(base, method, batches), own)
    compare("Flax NNX", around_the_step(base, method, batches), own)


if __name__ == "__main__":
    lj.emulate_devices(2)
    main()
