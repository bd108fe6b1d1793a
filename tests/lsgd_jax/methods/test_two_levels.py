"""Methods inside the nodes and across them, against NumPy and against one group alone."""

import functools

import harness
import jax
import numpy as np
import optax
import pytest
from harness import SGD, Run, close, in_turn, make, mostly_slow, rule_of

import lsgd_jax as lj


NODES, LOCALS, STEPS, RATE = 2, 4, 6, 0.1


def run(tx):
    """Returns starts, gradients, losses, and the parameters [T, W, 3] after every step."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=(8, 3)).astype(np.float32)
    grads = rng.normal(size=(STEPS, 8, 3)).astype(np.float32)
    losses = rng.uniform(size=(STEPS, 8)).astype(np.float32)
    workers = lj.Workers(NODES, LOCALS)
    seen, _ = harness.train(tx, workers, start, grads, losses)
    return start, grads, losses, seen


def node_mean(x):
    return np.repeat(x.reshape(NODES, LOCALS, -1).mean(axis=1), LOCALS, axis=0)


def test_allreduce_inside_the_node_with_diloco_across():
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = optax.chain(
        lj.allreduce(axes="local"), optax.sgd(RATE), lj.diloco(2, outer, axes="node")
    )
    start, grads, _, got = run(tx)
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


graph = lj.topology


GROUPED = {
    "easgd": lambda axes: lj.easgd(0.6, 2, axes=axes),
    "diloco": lambda axes: lj.diloco(2, axes=axes),
    "sgp": lambda axes: lj.sgp(graph.exponential, axes=axes),
    "wagma": lambda axes: lj.wagma(2, 3, axes=axes),
}


@functools.cache
def one_group(name, W):
    return make(GROUPED[name](("node", "local")), W)


EACH = [(n, axes) for n in GROUPED for axes in ("local", "node")]
EACH = [(*both, devices) for both, devices in in_turn(EACH, (8, 2, 1))]


# By default a method with a center, inside the nodes.
@pytest.mark.filterwarnings("ignore:the workers of a node never meet")
@pytest.mark.parametrize(
    "name, axes, devices",
    mostly_slow(EACH, fast=EACH[:1]),
)
def test_each_group_trains_by_itself(name, axes, devices):
    """Inside the nodes, or across them; each group has its own center."""
    nodes, locals = 2, 4
    run = Run(optax.chain(SGD, GROUPED[name](axes)), nodes, locals, devices)
    seen, state = run.train()
    number = np.arange(8).reshape(nodes, locals)
    centers = []
    for group in number if axes == "local" else number.T:
        rows = lambda tree, group=group: jax.tree.map(lambda x: x[group], tree)
        alone = one_group(name, len(group))
        expected, own = alone.train([rows(b) for b in run.batches], rows(run.start))
        for a, b in zip(seen, expected):
            close(rows(a), b)
        centers.append(jax.device_get(lj.center(expected[-1], own)))
    if name in ("easgd", "diloco"):
        field = {"easgd": "center", "diloco": "anchor"}[name]
        assert list(getattr(rule_of(state), field).axes) == [axes]
    center = jax.device_get(lj.center(seen[-1], state))
    close(center, jax.tree.map(lambda *c: np.mean(c, axis=0), *centers))
