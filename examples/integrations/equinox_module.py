"""Equinox: the arrays of a module are the parameters; its other fields stay static.

Two replicas under `eqx.filter_vmap`. Tested with equinox 0.13.8 and jax 0.10.2.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from own_loop import batches_of, compare, train

import lsgd_jax as lj


def loss_of(model, batch):
    x, y, _ = batch
    return jnp.square(jax.vmap(model)(x) - y).mean()


def main(steps: int = 40):
    base, o, batches = optax.adam(1e-2), lj.outer(lj.easgd(period=4)), batches_of(steps, 2)
    model = eqx.nn.MLP(4, 1, width_size=32, depth=1, key=jax.random.key(0))

    @eqx.filter_vmap(in_axes=None, axis_size=2, axis_name="node")
    def start(model):
        arrays = eqx.filter(model, eqx.is_inexact_array)
        return model, base.init(arrays), o.init(arrays)

    @eqx.filter_jit(donate="all")
    @eqx.filter_vmap(axis_name="node")
    def step(model, moments, state, batch):  # of one replica
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, batch)
        updates, moments = base.update(grads, moments)
        model = eqx.apply_updates(model, updates)
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        arrays, state = o.step(arrays, state, loss=loss)
        return eqx.combine(arrays, static), moments, state

    replicas = start(model)
    for batch in batches:
        replicas = step(*replicas, batch)

    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    loss_alone = lambda arrays, batch: loss_of(eqx.combine(arrays, static), batch)
    own = train(loss_alone, arrays, base, o.method, lj.Workers(nodes=2, locals=1), batches)
    compare("Equinox", eqx.filter(replicas[0], eqx.is_inexact_array), own)


if __name__ == "__main__":
    lj.emulate_devices(2)
    main()
