"""The plain training loop with `lj.Workers` that the other programs here compare with."""

import jax
import jax.numpy as jnp
import optax

import lsgd_jax as lj


def batches_of(steps, workers):
    """Returns batches of a regression: (x [W, 16, 4], y [W, 16, 1], key [W]) per step."""
    x = jax.random.normal(jax.random.key(1), [steps, workers, 16, 4])
    keys = jax.random.split(jax.random.key(2), [steps, workers])
    return list(zip(x, jnp.sin(x.sum(-1, keepdims=True)), keys))


def train(loss_of, params, base, method, workers, batches):
    """Trains with a method after an optax optimizer and returns the parameters [W, ...].

    loss_of: maps the parameters and the batch of one worker to the loss.
    params: the parameters of one worker.
    batches: a list of trees with leaves [W, ...].
    """
    tx = optax.chain(base, method)

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(grads, state, params, loss=loss)
        return lj.apply_updates(params, updates), state

    params = workers.replicate(params)
    state, step = workers.map(tx.init)(params), workers.map(step, donate=(0, 1))
    for batch in batches:
        params, state = step(params, state, workers.put(batch))
    return params


def each(workers, fit, *trees):
    """Calls a function on the host for each worker of this process."""
    row = lambda i: jax.tree.map(lambda leaf: jnp.asarray(leaf[i]), trees)
    trees = workers.fetch(trees)
    rows = [fit(*row(i)) for i in workers.owned]
    return workers.put_owned(jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))


def rounds_by_hand(fit, params, outer, batches):
    """Does what DiLoCo does with a period of one round, without workers."""
    state = outer.init(params)
    for batch in batches:
        rows = [fit(params, *row) for row in zip(*batch)]
        gradient = jax.tree.map(
            lambda start, *ends: start - sum(ends) / len(ends), params, *rows
        )
        updates, state = outer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def compare(name, theirs, ours, tolerance=1e-5):
    """Prints the largest difference between two trees; raises if it is not small."""
    pairs = zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True)
    difference = max(float(jnp.abs(x - y).max()) for x, y in pairs)
    print(f"{name}: differs by {difference:.1e}")
    if not difference < tolerance:
        raise AssertionError(f"expected a difference below {tolerance}, got {difference}")
