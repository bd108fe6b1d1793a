"""Equinox: the arrays of a module are the parameters; its other fields stay static.

Two replicas under `eqx.filter_vmap`. Tested with equinox 0.13.8 and jax 0.10.2.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from own_loop import batches_of, compare, train

import lsgd_jax as lj


ADAM = optax.adam(1e-2)


def loss_of(model, batch):
    x, y, _ = batch
    return jnp.square(jax.vmap(model)(x) - y).mean()


def update(state, batch):
    model, moments = state
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, batch)
    updates, moments = ADAM.update(grads, moments)
    return (eqx.apply_updates(model, updates), moments), loss


def with_replicas(method, state, batches):
    get = lambda state: eqx.filter(state[0], eqx.is_inexact_array)  # new
    put = lambda state, arrays: (eqx.combine(arrays, state[0]), state[1])  # new
    step = lj.around(update, method, params=(get, put))  # new
    init = eqx.filter_vmap(step.init, in_axes=None, axis_size=2, axis_name="node")  # new
    step = eqx.filter_vmap(step, axis_name="node")  # new
    state, step = init(state), eqx.filter_jit(step)
    for batch in batches:
        state, loss = step(state, batch)
    return get(state.state)


def main(steps: int = 40):
    method, batches = lj.easgd(period=4), batches_of(steps, 2)
    model = eqx.nn.MLP(4, 1, width_size=32, depth=1, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    theirs = with_replicas(method, (model, ADAM.init(arrays)), batches)

    loss_alone = lambda arrays, batch: loss_of(eqx.combine(arrays, static), batch)
    own = train(loss_alone, arrays, ADAM, method, lj.Workers(nodes=2, locals=1), batches)
    compare("Equinox", theirs, own)


if __name__ == "__main__":
    lj.emulate_devices(2)
    main()
