"""Haiku: an update of a NamedTuple of parameters, moments and a random key.

Four workers with leaders and with their own dropout masks. Tested with dm-haiku 0.0.17 and
jax 0.10.2.
"""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from own_loop import batches_of, compare, train

import lsgd_jax as lj


OPTIMIZER = optax.adam(1e-2)


class State(NamedTuple):
    params: hk.Params
    opt_state: optax.OptState
    rng: jax.Array


@hk.transform
def network(x):
    hidden = hk.dropout(hk.next_rng_key(), 0.1, jnp.tanh(hk.Linear(32)(x)))
    return hk.Linear(1)(hidden)


def loss_of(params, batch):
    x, y, key = batch
    return jnp.square(network.apply(params, key, x) - y).mean()


def update(state, batch):
    rng, key = jax.random.split(state.rng)
    loss, grads = jax.value_and_grad(loss_of)(state.params, (*batch, key))
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    return State(params, opt_state, rng), {"loss": loss}


def with_workers(method, state, batches):
    workers, step = lj.Workers(nodes=2, locals=2), lj.around(update, method)  # new
    state = workers.map(step.init)(workers.replicate(state, keys="split"))  # new
    step = workers.map(step, donate=0)  # new, in place of jax.jit
    for x, y, _ in batches:
        state, metrics = step(state, workers.put((x, y)))  # new: put
    return state.state.params


def main(steps: int = 40):
    method, batches = lj.lsgd(local_period=4, global_period=8), batches_of(steps, 4)
    params, rng = network.init(jax.random.key(0), batches[0][0][0]), jax.random.key(3)
    theirs = with_workers(method, State(params, OPTIMIZER.init(params), rng), batches)

    rngs, rows = jax.random.split(rng, 4), []
    for x, y, _ in batches:
        rngs, keys = jax.vmap(jax.random.split, out_axes=1)(rngs)
        rows.append((x, y, keys))
    workers = lj.Workers(nodes=2, locals=2)
    compare("Haiku", theirs, train(loss_of, params, OPTIMIZER, method, workers, rows))


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
