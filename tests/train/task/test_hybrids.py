"""Combined methods against their equations in NumPy."""

import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj
from train.task import hybrids


GOALS = np.array([1.0, 2.0, 4.0, 9.0])


def trajectory(tx, nodes, steps):
    """Parameters [steps, 4] of four workers that descend from 0 to different goals."""
    workers = lj.Workers(nodes, 4 // nodes)

    def step(x, state, goal):
        loss, gradient = (x - goal) ** 2, 2 * (x - goal)
        updates, state = tx.update(gradient, state, x, value=loss)
        return lj.apply_updates(x, updates), state

    x, goals = workers.put(jnp.zeros(4)), workers.put(jnp.asarray(GOALS, jnp.float32))
    state, seen, step = workers.map(tx.init)(x), [], workers.map(step)
    for _ in range(steps):
        x, state = step(x, state, goals)
        seen.append(np.asarray(x))
    return np.stack(seen), lj.diagnostics(state)


def test_diloco_leader_moves_its_anchor_to_the_leader():
    outer = optax.sgd(0.5)
    tx = optax.chain(optax.sgd(0.1), hybrids.diloco_leader(2, outer, loss_window=1))
    seen, (pull,) = trajectory(tx, nodes=2, steps=6)
    x, anchor = np.zeros(4), 0.0
    for t in range(1, 7):
        losses = (x - GOALS) ** 2
        x = x - 0.2 * (x - GOALS)
        if t % 2 == 0:
            leader = np.argmin(losses)
            anchor -= 0.5 * (anchor - x[leader])
            x = np.full(4, anchor)
        np.testing.assert_allclose(seen[t - 1], x, rtol=1e-5)
    assert pull.leader.tolist() == [leader] * 4 and pull.exchanges == 3


def test_lsgd_diloco_pulls_inside_nodes_and_across():
    method = hybrids.lsgd_diloco(0.25, 2, 4, optax.sgd(0.5), loss_window=1)
    seen, pulls = trajectory(optax.chain(optax.sgd(0.1), method), nodes=2, steps=8)
    x, anchors = np.zeros(4), np.zeros(2)
    for t in range(1, 9):
        losses = ((x - GOALS) ** 2).reshape(2, 2)
        x = x - 0.2 * (x - GOALS)
        if t % 2 == 0:
            grid = x.reshape(2, 2)
            leaders = grid[[0, 1], losses.argmin(axis=1)]
            x = (grid - 0.25 * (grid - leaders[:, None])).ravel()
        if t % 4 == 0:
            anchors -= 0.5 * (anchors - x.reshape(2, 2).mean(axis=0))
            x = np.tile(anchors, 2)
        np.testing.assert_allclose(seen[t - 1], x, rtol=1e-5)
    assert [pull.axes for pull in pulls] == [("local",), ("node",)]
