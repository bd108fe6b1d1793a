"""Keras 3: `stateless_call` and a Keras optimizer instead of one of optax.

Four workers in two nodes, with leaders. Tested with keras 3.15.1 and jax 0.10.2.
"""

import os


os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import optax
from own_loop import batches_of, compare, train

import lsgd_jax as lj


def with_workers(step, method, start, batches):
    workers, step = lj.Workers(nodes=2, locals=2), lj.around(step, method, params=0)  # new
    state = workers.map(step.init)(workers.replicate(start))  # new
    step = workers.map(step, donate=0)  # new, in place of jax.jit
    for batch in batches:
        state, loss = step(state, workers.put(batch))  # new: put
    return state.state[0]


def main(steps: int = 40):
    layers = keras.Input((4,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def loss_of(params, rest, batch):
        y, rest = model.stateless_call(params, rest, batch[0], training=True)
        return keras.losses.mean_squared_error(batch[1], y).mean(), rest

    def step(state, batch):
        params, rest, momenta = state
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, rest), grads = gradient_of(params, rest, batch)
        params, momenta = optimizer.stateless_apply(momenta, grads, params)
        return (params, rest, momenta), loss

    start = tuple(
        [jnp.asarray(v.value) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    )
    method, batches = lj.lsgd(local_period=4, global_period=8), batches_of(steps, 4)
    theirs = with_workers(step, method, start, batches)

    loss_alone = lambda params, batch: loss_of(params, start[1], batch)[0]
    base, workers = optax.sgd(0.05, momentum=0.9), lj.Workers(nodes=2, locals=2)
    own = train(loss_alone, start[0], base, method, workers, batches)
    compare("Keras", theirs, own)


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
