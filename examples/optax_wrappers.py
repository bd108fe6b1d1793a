"""Optax wrappers and optimizers with an exchange: injected rates, Muon, schedule-free.

Each function returns a chain for one worker; they share one training loop. docs/own_loop.md
explains where a wrapper may be placed, docs/recipes.md accumulates gradients.

    python examples/optax_wrappers.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj


def injected():
    """Lets the loop set the learning rate, and a schedule the strength of the pull."""
    base = optax.inject_hyperparams(optax.sgd)(learning_rate=0.05, momentum=0.9)
    easgd = optax.inject_hyperparams(lj.easgd, lj.static_args(lj.easgd))
    beta = optax.linear_schedule(0.9, 0.3, 40)
    return optax.chain(base, easgd(beta=beta, period=2))


def muon():
    """Runs Muon inside DiLoCo (MuLoCo): Muon for matrices, Adam for the rest."""
    return optax.chain(optax.contrib.muon(2e-2), lj.diloco(period=8))


def schedule_free():
    """Exchanges z as well, which schedule-free SGD keeps beside the parameters."""
    base = optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1)
    return lj.with_state(base, lj.local_sgd(period=4), "z")


def train(tx, steps=48):
    """Returns the losses [steps, W], and the final parameters and state of 4 workers."""
    workers = lj.Workers(nodes=2, locals=2)

    def train_step(params, state, key):  # one worker's step
        x = jax.random.normal(key, [32, 4])

        def loss_of(params):
            y = jnp.tanh(x @ params["in"]) @ params["out"]
            return jnp.square(y - jnp.sin(x.sum(1, keepdims=True))).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params, loss=loss)
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
    return np.array(losses), params, state


CHAINS = {f.__name__: f for f in (injected, muon, schedule_free)}

if __name__ == "__main__":
    lj.emulate_devices(4)
    for name, chain in CHAINS.items():
        losses, _, _ = train(chain())
        print(f"{name}: loss {losses[:5].mean():.3f} -> {losses[-5:].mean():.3f}")
