"""FlowJAX: rounds of `fit_to_data`, which owns its loop and cannot be traced.

Each of four workers fits a flow to its own data for two epochs, and DiLoCo follows each
round. Compared with the same rounds by hand. Tested with flowjax 19.1.2 and jax 0.10.2.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import paramax
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow
from flowjax.train import fit_to_data
from own_loop import compare, each, rounds_by_hand

import lsgd_jax as lj


ADAM = optax.adam(1e-2)


def with_workers(fit, params, method, batches):
    workers, o = lj.Workers(nodes=4, locals=1), lj.outer(method)  # new
    params = workers.replicate(params)  # new
    state, exchange = workers.map(o.init)(params), workers.map(o.step)  # new
    for batch in batches:
        params = each(workers, fit, params, *batch)  # new: each
        params, state = exchange(params, state)  # new
    return params


def main(rounds: int = 3):
    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(2)), flow_layers=2, nn_width=8
    )
    is_leaf = lambda leaf: isinstance(leaf, paramax.NonTrainable)
    arrays, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=is_leaf)

    def fit(arrays, key, x):
        options = dict(optimizer=ADAM, max_epochs=2, batch_size=32, show_progress=False)
        fitted, _ = fit_to_data(key, eqx.combine(arrays, static), x, **options)
        return eqx.filter(fitted, eqx.is_inexact_array, is_leaf=is_leaf)

    keys = jax.random.split(jax.random.key(1), [rounds, 4])
    batches = list(zip(keys, jax.random.normal(jax.random.key(2), [rounds, 4, 128, 2]) + 1))
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    theirs = rounds_by_hand(fit, arrays, outer, batches)
    compare("FlowJAX", theirs, with_workers(fit, arrays, lj.diloco(1, outer), batches))


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
