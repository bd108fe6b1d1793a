"""Methods under custom axis names, in `shard_map`, `vmap` and `pmap`.

A method needs axis names and nothing else. Here 8 workers run the same steps in a
`shard_map` over a mesh of 2 x 4 devices, in a `vmap` of a `vmap` on one device, and, with
one level only, in a `pmap`.

    python examples/without_workers.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj


STEPS = 20
TWO_LEVELS = lj.lsgd(0.3, 0.2, local_period=2, global_period=4)
ONE_LEVEL = lj.local_sgd(period=4, axes="worker")


def train(goal, method):
    """Runs all steps of one worker towards its goal, a scalar, and returns x [3]."""
    tx = optax.chain(optax.sgd(0.1, momentum=0.5), method)

    def step(carry, key):
        x, state = carry
        noise = jax.random.normal(key, x.shape)
        loss, grads = jax.value_and_grad(lambda x: jnp.square(x - goal + noise).sum())(x)
        updates, state = tx.update(grads, state, x, loss=loss)
        return (lj.apply_updates(x, updates), state), None

    x = jnp.zeros(3)
    keys = jax.random.split(jax.random.key(0), STEPS)
    (x, _), _ = jax.lax.scan(step, (x, tx.init(x)), keys)
    return x


def in_shard_map(goals):
    """Trains for goals [8] over a mesh, whose axes must be of the type Auto."""
    axes = ("node", "local")
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    one = lambda goals: train(goals[0], TWO_LEVELS)[None]
    spec = P(axes)
    # The carry of the scan changes from invariant to varying, so this is not checked.
    mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped)(goals)


def in_vmap(goals):
    """Trains all workers on one device."""
    one = lambda goal: train(goal, TWO_LEVELS)
    both = jax.vmap(jax.vmap(one, axis_name="local"), axis_name="node")
    return jax.jit(both)(goals.reshape(2, 4)).reshape(8, 3)


def in_pmap(goals):
    """Trains with one level, over all devices."""
    return jax.pmap(lambda goal: train(goal, ONE_LEVEL), axis_name="worker")(goals)


def main():
    """Returns x [8, 3] of each of the three."""
    goals = jnp.arange(8.0)
    return [np.asarray(run(goals)) for run in (in_shard_map, in_vmap, in_pmap)]


if __name__ == "__main__":
    lj.emulate_devices(8)
    for name, x in zip(("shard_map", "vmap", "pmap"), main()):
        print(f"{name}: {x.mean(axis=1).round(3)}")
