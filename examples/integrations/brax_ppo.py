"""Brax: rounds of `ppo.train`, which owns its loop, its optimizer and a mean of gradients.

Each of two workers trains for a round on environments of its own, and DiLoCo follows.
`restore_params` takes the networks; a round starts Adam and the environments anew, and
compiles anew. Compared with the same rounds by hand. Tested with brax 0.14.2, jax 0.12.0.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from brax import envs
from brax.training.agents.ppo import networks
from brax.training.agents.ppo import train as ppo
from own_loop import compare, each, rounds_by_hand

import lsgd_jax as lj


OPTIONS = dict(
    max_devices_per_host=1,
    num_envs=4,
    episode_length=32,
    unroll_length=4,
    batch_size=4,
    num_minibatches=2,
    learning_rate=1e-3,
    network_factory=functools.partial(
        networks.make_ppo_networks,
        policy_hidden_layer_sizes=(16,),
        value_hidden_layer_sizes=(16,),
    ),
    run_evals=False,
)


def with_workers(fit, params, method, batches):
    workers, o = lj.Workers(nodes=2, locals=1), lj.outer(method)  # new
    params = workers.replicate(params)  # new
    state, exchange = workers.map(o.init)(params), workers.map(o.step)  # new
    for seeds in batches:
        params = each(workers, fit, params, *seeds)  # new: each
        params, state = exchange(params, state)  # new
    return params


def main(rounds: int = 2):
    # brax 0.14.2 calls this function, which jax has no longer.
    jax.device_put_replicated = lambda tree, devices: jax.pmap(
        lambda _: tree, devices=devices
    )(jnp.arange(len(devices)))
    env = envs.get_environment("fast")
    _, (normalizer, *start), _ = ppo.train(env, 0, **OPTIONS)

    def fit(params, seed):
        restored = dict(restore_params=(normalizer, *params), seed=int(seed))
        _, (_, *params), _ = ppo.train(env, 256, **restored, **OPTIONS)
        return params

    batches = [(row,) for row in jnp.arange(2 * rounds).reshape(rounds, 2)]
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    theirs = rounds_by_hand(fit, start, outer, batches)
    ours = with_workers(fit, start, lj.diloco(1, outer), batches)
    compare("Brax", *jax.device_get((theirs, ours)))


if __name__ == "__main__":
    lj.emulate_devices(2)
    main()
