"""One method inside the nodes and another one across nodes, against NumPy."""

import harness
import jax
import numpy as np
import optax
import pytest

import lsgd_jax as lj


NODES, LOCALS, STEPS, RATE = 2, 4, 6, 0.1


def run(tx, devices):
    """Returns starts, gradients, losses, and the parameters [T, W, 3] after every step."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=(8, 3)).astype(np.float32)
    grads = rng.normal(size=(STEPS, 8, 3)).astype(np.float32)
    losses = rng.uniform(size=(STEPS, 8)).astype(np.float32)
    workers = lj.Workers(NODES, LOCALS, devices=jax.devices()[:devices])
    seen, _ = harness.train(tx, workers, start, grads, losses)
    return start, grads, losses, seen


def node_mean(x):
    return np.repeat(x.reshape(NODES, LOCALS, -1).mean(axis=1), LOCALS, axis=0)


@pytest.mark.parametrize("devices", [8, 2])
def test_allreduce_inside_the_node_with_diloco_across(devices):
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = optax.chain(
        lj.allreduce(axes="local"), optax.sgd(RATE), lj.diloco(2, outer, axes="node")
    )
    start, grads, _, got = run(tx, devices)
    across = lambda x: np.tile(x.reshape(NODES, LOCALS, -1).mean(axis=0), (NODES, 1))
    x, anchor, momentum = start, across(start), 0
    for t in range(STEPS):
        x = x - RATE * node_mean(grads[t])
        if t % 2:
            way = anchor - across(x)
            momentum = 0.9 * momentum + way
            anchor = anchor - 0.7 * (way + 0.9 * momentum)
            x = anchor
        np.testing.assert_allclose(got[t], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [8, 2])
def test_lsgd_inside_the_node_with_sgp_across(devices):
    tx = optax.chain(
        optax.sgd(RATE),
        lj.exchange(
            lj.lsgd(0.3, 0.0, local_period=2, loss_window=1),
            lj.sgp(lj.topology.exponential(NODES), axes="node"),
        ),
    )
    start, grads, losses, got = run(tx, devices)
    x = start
    for t in range(STEPS):
        x = x - RATE * grads[t]
        if t % 2:
            first = losses[t].reshape(NODES, LOCALS).argmin(axis=1) + [0, LOCALS]
            x = x - 0.3 * (x - np.repeat(x[first], LOCALS, axis=0))
        # Two nodes send each other one half, so that all weights stay 1.
        x = (x + np.roll(x, LOCALS, axis=0)) / 2
        np.testing.assert_allclose(got[t], x, rtol=1e-5, atol=1e-6)
