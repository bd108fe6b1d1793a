"""Two workers under DiLoCo, each sharded over four devices.

The step of a worker is written as for one large device. A worker's batch, its parameters
and the moments of Adam are split over its devices, and XLA gathers weights where it needs
them (fully sharded data parallelism). Between workers a device sends only its own shard.

    python examples/sharded_workers.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj


STEPS, BATCH, WIDTH = 40, 32, 256


def loss_of(params, x):
    """Returns the squared error of two layers that learn the sine of the sum of inputs."""
    hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return jnp.square(hidden @ params["out"]["kernel"] - jnp.sin(x.sum(1))[:, None]).mean()


def main():
    """Returns the losses [steps, W], the parameters, and diagnostics of the exchange."""
    workers = lj.Workers(nodes=2, locals=1, inside={"fsdp": 4})
    tx = optax.chain(optax.adam(1e-2), lj.diloco(period=10))

    def train_step(params, state, key):  # one worker's step
        x = jax.random.normal(key, [BATCH, 8])
        x = jax.lax.with_sharding_constraint(x, P("fsdp"))  # split over the devices
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(grads, state, params, value=loss)
        return lj.apply_updates(params, updates), state, loss

    draw = np.random.default_rng(0).normal
    start = {
        "in": {"kernel": draw(size=[8, WIDTH]) / 3, "bias": np.zeros([1, WIDTH])},
        "out": {"kernel": draw(size=[WIDTH, 1]) / 16},
    }
    start = jax.tree.map(np.float32, start)
    params = workers.replicate(start, lj.largest_dimension("fsdp", 4, smallest=1))
    # Moments and anchor are sharded like the parameters.
    state = workers.map(tx.init)(params)
    step = workers.map(train_step, donate=(0, 1))
    losses = []
    for key in jax.random.split(jax.random.key(0), STEPS):
        params, state, loss = step(params, state, workers.put(jax.random.split(key, 2)))
        losses.append(loss)
    return np.array(losses), params, lj.diagnostics(state)[0]


if __name__ == "__main__":
    lj.emulate_devices(8)  # a CPU is emulated as 8 devices
    losses, params, sent = main()
    print(f"loss {losses[:5].mean():.3f} -> {losses[-5:].mean():.3f}")
    for name, kernel in (("in", params["in"]["kernel"]), ("out", params["out"]["kernel"])):
        shard = kernel.addressable_shards[0].data.shape
        print(f"{name}: {kernel.shape} in shards {shard}, {kernel.sharding.spec}")
    print(f"{sent.exchanges} exchanges of {sent.payload} bytes for each device")
