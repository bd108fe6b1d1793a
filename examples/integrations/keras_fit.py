"""Keras 3: rounds of `model.fit`, which owns its loop, with DiLoCo after each round.

Each of four workers has a model and an optimizer of its own. Compared with the same rounds
by hand. Tested with keras 3.15.1 and jax 0.10.2.
"""

import os


os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import optax
from own_loop import batches_of, compare

import lsgd_jax as lj


def create():
    keras.utils.set_random_seed(0)
    layers = keras.Input((4,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def fit(models, *data):
    for model, x, y in zip(models, *data, strict=True):
        model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0)


def set_weights(models, rows):
    for model, row in zip(models, rows, strict=True):
        model.set_weights(row)


def with_workers(models, start, method, batches):
    workers, o = lj.Workers(nodes=4, locals=1), lj.outer(method)  # new
    state, step = workers.replicate(o.init(start)), workers.map(o.step)  # new
    for x, y in batches:
        fit(models, x, y)
        rows = zip(*(model.get_weights() for model in models))  # new
        params, state = step(workers.put_owned([*map(np.stack, rows)]), state)  # new
        set_weights(models, zip(*workers.fetch(params)))  # new
    return params


def by_hand(models, start, outer, batches):
    params, state = start, outer.init(start)
    for x, y in batches:
        fit(models, x, y)
        rows = zip(params, *(model.get_weights() for model in models))
        gradient = [start - sum(ends) / 4 for start, *ends in rows]
        updates, state = outer.update(gradient, state)
        params = optax.apply_updates(params, updates)
        set_weights(models, [[*map(np.array, params)]] * 4)
    return params


def main(rounds: int = 4):
    batches = [(np.asarray(x), np.asarray(y)) for x, y, _ in batches_of(rounds, 4)]
    outer, start = optax.sgd(0.7, momentum=0.9, nesterov=True), create().get_weights()
    theirs = by_hand([create() for _ in range(4)], start, outer, batches)
    models = [create() for _ in range(4)]
    ours = with_workers(models, start, lj.diloco(1, outer), batches)
    compare("Keras' fit", theirs, ours)


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
