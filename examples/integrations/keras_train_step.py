"""Keras 3: `model.train_step` of a compiled model, with its state of four lists of arrays.

Four workers in two nodes, with leaders. `model.fit` owns its loop and cannot take the step;
keras_fit.py has rounds of it. Tested with keras 3.15.1 and jax 0.10.2.
"""

import os


os.environ["KERAS_BACKEND"] = "jax"
import jax.numpy as jnp
import keras
import optax
from own_loop import batches_of, compare, train

import lsgd_jax as lj


def loss_of(model, params, rest, batch):
    y = model.stateless_call(params, rest, batch[0], training=True)[0]
    return jnp.square(batch[1] - y).mean()


def with_workers(model, method, start, batches):
    # Keras logs the mean loss since its metrics were 0; leaders need the loss of a step.
    step = lambda state, data: model.train_step((*state[:3], start[3]), data)  # new
    workers, step = lj.Workers(nodes=2, locals=2), lj.around(step, method, params=0)  # new
    state = workers.map(step.init)(workers.replicate(start))  # new
    step = workers.map(step, donate=0)  # new, in place of jax.jit
    for x, y, _ in batches:
        logs, state = step(state, workers.put((x, y)))  # new: put
    return state.state[0]


def main(steps: int = 40):
    layers = keras.Input((4,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    start = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        [v.value for v in model.optimizer.variables],
        [v.value for v in model.metrics_variables],
    )
    method, batches = lj.lsgd(local_period=4, global_period=8), batches_of(steps, 4)
    theirs = with_workers(model, method, start, batches)

    loss_alone = lambda params, batch: loss_of(model, params, start[1], batch)
    base, workers = optax.sgd(0.05, momentum=0.9), lj.Workers(nodes=2, locals=2)
    own = train(loss_alone, start[0], base, method, workers, batches)
    compare("Keras' train_step", theirs, own)


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
