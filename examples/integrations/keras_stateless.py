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


def main(steps: int = 40):
    workers, method = (
        lj.Workers(nodes=2, locals=2),
        lj.lsgd(local_period=4, global_period=8),
    )
    layers = keras.Input((4,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
    values = lambda variables: [jnp.asarray(v.value) for v in variables]
    start, rest = values(model.trainable_variables), values(model.non_trainable_variables)
    o = lj.outer(method)

    def loss_of(params, rest, batch):
        y, rest = model.stateless_call(params, rest, batch[0], training=True)
        return keras.losses.mean_squared_error(batch[1], y).mean(), rest

    @workers.map
    def step(params, rest, momenta, state, batch):  # of one worker
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, rest), grads = gradient_of(params, rest, batch)
        params, momenta = optimizer.stateless_apply(momenta, grads, params)
        params, state = o.step(params, state, loss=loss)
        return params, rest, momenta, state

    trees = workers.replicate((start, rest, values(optimizer.variables), o.init(start)))
    for batch in batches_of(steps, 4):
        trees = step(*trees, workers.put(batch))

    loss_alone = lambda params, batch: loss_of(params, rest, batch)[0]
    base = optax.sgd(0.05, momentum=0.9)
    own = train(loss_alone, start, base, method, workers, batches_of(steps, 4))
    compare("Keras", trees[0], own)


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
