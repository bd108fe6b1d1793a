"""A Flax NNX model: split into its parameters and the rest, merged again in the step.

python examples/flax_nnx.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import lsgd_jax as lj


class Network(nnx.Module):
    """Two layers with dropout between them."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(4, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def main(steps: int = 60):
    """Returns the workers' losses [steps, W] and the center as a model."""
    workers = lj.Workers(nodes=2, locals=2)
    graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)
    tx = optax.chain(optax.adam(1e-2), lj.lsgd(local_period=4, global_period=8))

    def train_step(params, rest, state, key):  # one worker's step
        x = jax.random.normal(key, [32, 4])

        def loss_of(params):
            model = nnx.merge(graph, params, rest, copy=True)
            loss = jnp.square(model(x) - jnp.sin(x.sum(1, keepdims=True))).mean()
            return loss, nnx.state(model, nnx.Not(nnx.Param))  # dropout counts its keys

        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return lj.apply_updates(params, updates), rest, state, loss

    params, rest = workers.replicate((params, rest))
    state = workers.map(tx.init)(params)
    step = workers.map(train_step, donate=(0, 1, 2))
    losses = []
    for key in jax.random.split(jax.random.key(0), steps):
        keys = workers.put(jax.random.split(key, workers.num_workers))
        params, rest, state, loss = step(params, rest, state, keys)
        losses.append(loss)
    first = jax.tree.map(lambda x: x[0], rest)
    return np.array(losses), nnx.merge(graph, lj.consensus(params), first)


if __name__ == "__main__":
    lj.emulate_devices(4)
    losses, center = main()
    print(f"loss {losses[:5].mean():.3f} -> {losses[-5:].mean():.3f}")
    print("the center at 0:", center(jnp.zeros([1, 4])))
