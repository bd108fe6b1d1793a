"""An Equinox model: its arrays are the parameters, the rest stays outside.

pip install equinox
python examples/equinox_module.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj


def main(steps: int = 60):
    """Returns the workers' losses [steps, W] and the center as a model."""
    workers = lj.Workers(nodes=2, locals=2)
    model = eqx.nn.MLP(4, 1, width_size=32, depth=1, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    tx = optax.chain(optax.adam(1e-2), lj.easgd(period=4))

    def train_step(arrays, state, key):  # one worker's step
        x = jax.random.normal(key, [32, 4])

        def loss_of(arrays):
            y = jax.vmap(eqx.combine(arrays, static))(x)
            return jnp.square(y - jnp.sin(x.sum(1, keepdims=True))).mean()

        loss, grads = jax.value_and_grad(loss_of)(arrays)
        updates, state = tx.update(grads, state, arrays, value=loss)
        return lj.apply_updates(arrays, updates), state, loss

    params = workers.replicate(arrays)
    state = workers.map(tx.init)(params)
    step = workers.map(train_step, donate=(0, 1))
    losses = []
    for key in jax.random.split(jax.random.key(0), steps):
        keys = workers.put(jax.random.split(key, workers.num_workers))
        params, state, loss = step(params, state, keys)
        losses.append(loss)
    return np.array(losses), eqx.combine(lj.center(params, state), static)


if __name__ == "__main__":
    lj.emulate_devices(4)
    losses, center = main()
    print(f"loss {losses[:5].mean():.3f} -> {losses[-5:].mean():.3f}")
    print("the center at 0:", center(jnp.zeros(4)))
