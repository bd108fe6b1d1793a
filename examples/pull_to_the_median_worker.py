"""A custom method: every few steps workers are pulled towards the median worker.

The median worker is the one whose loss is the median of its group, so that neither the
luckiest nor the worst batch decides where the others go.

    python examples/pull_to_the_median_worker.py
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import lsgd_jax as lj


class MedianState(NamedTuple):
    """loss: this worker's last one. followed: the median worker, equal in the group."""

    loss: jax.Array
    followed: lj.Shared[jax.Array]


def median_worker(axes=("node", "local")) -> lj.rules.Rule:
    """The parameters of the worker whose loss is the median of its group."""

    def init(params):
        return MedianState(jnp.float32(jnp.inf), lj.rules.Group(axes).shared(jnp.int32(-1)))

    def step(u, x, state, loss, t):
        return u, state._replace(loss=loss.astype(jnp.float32)), True

    def agree(group, x, y, state, takes_part, t):
        mine = jnp.where(takes_part, state.loss, jnp.inf)
        losses = group.gather(mine)  # [W], the same for all
        count = jnp.isfinite(losses).sum()
        found = count > 0
        median = jnp.argsort(losses)[jnp.maximum(count - 1, 0) // 2].astype(jnp.int32)
        z = group.broadcast(y, median)
        followed = jnp.where(found, median, state.followed.value)
        return z, found, state._replace(followed=group.shared(followed))

    return lj.rules.Rule(axes, init, agree, step)


def main() -> tuple[list[int], lj.Diagnostics]:
    """Returns the worker followed at each pull, and the diagnostics at the end."""
    lj.emulate_devices(8)
    workers = lj.Workers(nodes=2, locals=4)
    pull = lj.Pull(median_worker(), strength=0.5, every=4)
    tx = optax.chain(optax.sgd(0.1), lj.exchange(pull))

    def train_step(x, state, goal):
        loss, grads = jax.value_and_grad(lambda x: jnp.sum((x - goal) ** 2))(x)
        updates, state = tx.update(grads, state, x, loss=loss)
        return lj.apply_updates(x, updates), state

    x = workers.replicate(jnp.zeros(3))
    goals = workers.put(jnp.arange(1.0, 9.0)[:, None])  # worker i has the goal i + 1
    state = workers.map(tx.init)(x)
    step = workers.map(train_step, donate=(0, 1))
    followed = []
    for t in range(1, 21):
        x, state = step(x, state, goals)
        if t % 4 == 0:
            followed.append(int(state[1].pulls[0].rule.followed.value))
    (sent,) = lj.diagnostics(state)
    return followed, sent


if __name__ == "__main__":
    followed, sent = main()
    print("followed", followed)
    print(f"{sent.exchanges} exchanges of {sent.payload} bytes, {sent.bytes_sent} in all")
