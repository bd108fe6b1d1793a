"""bfloat16 in the network, float32 parameters and exchanges.

Parameters, moments and pulls are float32 (master weights). The step casts the parameters to
bfloat16, and gradients come back as float32. Parameters in bfloat16 also work and halve the
traffic, but small steps are then lost to rounding.

    python examples/mixed_precision.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj


def main(steps: int = 60):
    """Returns the workers' losses [steps, W] and their parameters."""
    workers = lj.Workers(nodes=2, locals=2)
    tx = optax.chain(optax.adam(1e-2), lj.diloco(period=10))

    def train_step(params, state, key):  # one worker's step
        x = jax.random.normal(key, [32, 4], jnp.bfloat16)

        def loss_of(params):
            half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            y = jnp.tanh(x @ half["in"]) @ half["out"]
            target = jnp.sin(x.astype(jnp.float32).sum(1, keepdims=True))
            return jnp.square(y.astype(jnp.float32) - target).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return lj.apply_updates(params, updates), state, loss

    draw = np.random.default_rng(0).normal
    start = {"in": draw(size=[4, 32]) / 2, "out": draw(size=[32, 1]) / 6}
    params = workers.replicate(jax.tree.map(np.float32, start))
    state = workers.map(tx.init)(params)
    step = workers.map(train_step, donate=(0, 1))
    losses = []
    for key in jax.random.split(jax.random.key(0), steps):
        params, state, loss = step(params, state, workers.put(jax.random.split(key, 4)))
        losses.append(loss)
    return np.array(losses), params


if __name__ == "__main__":
    lj.emulate_devices(4)
    losses, params = main()
    print(f"loss {losses[:5].mean():.3f} -> {losses[-5:].mean():.3f}")
    print("parameters are", params["in"].dtype)
