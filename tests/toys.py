"""A small task for asynchronous workers: worker i is drawn to a place of its own."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj
from lsgd_jax._src.asynchronous.engine.worker import Training
from lsgd_jax._src.asynchronous.simulated.network import NETWORKS
from lsgd_jax._src.asynchronous.simulated.speeds import Speeds
from lsgd_jax.asynchronous import (
    ADPSGD,
    LSGD,
    WAGMA,
    DecoupledDiLoCo,
    DiLoCo,
    Pairwise,
    simulator,
)


BASE = optax.sgd(0.05, momentum=0.5)
PLACES = np.random.default_rng(0).normal(size=(8, 3, 2)).astype(np.float32)
# Every free-running method, with short periods.
FREE_RUNNING = {
    "lsgd": LSGD(0.5, 0.25, local_period=2, global_period=4),
    "pairwise": Pairwise(),
    "pairwise-loss": Pairwise("loss"),
    "pairwise-clock": Pairwise("clock"),
    "adpsgd": ADPSGD(),
    "wagma": WAGMA(2, sync_period=8),
    "wagma-int8": WAGMA(2, sync_period=8, wire="int8"),
    "diloco": DiLoCo(4, learning_rate=0.3, momentum=0.3),
    "diloco-delayed": DiLoCo(4, learning_rate=0.3, momentum=0.3, delay=4),
    "diloco-together": DiLoCo(4, learning_rate=0.3, momentum=0.3, together=True),
    "decoupled-diloco": DecoupledDiLoCo(4, learning_rate=0.3, momentum=0.3),
}
NOISE = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)


def slow(*values):
    """A parameter of a test that is only run with `-m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def start(dtype=jnp.float32):
    return {"w": jnp.zeros([3, 2], dtype), "b": jnp.ones([4], dtype)}


def loss_and_grads(x, i, t):
    """At step t of worker i; noisy, so that who leads changes."""

    def loss(x):
        near = jnp.sum((x["w"].astype(jnp.float32) - jnp.asarray(PLACES)[i]) ** 2)
        noise = jnp.asarray(NOISE)[t % 64, i]
        return near + noise * jnp.sum(x["b"].astype(jnp.float32))

    return jax.value_and_grad(loss)(x)


@jax.jit
def _step(x, s, i, t):
    loss, g = loss_and_grads(x, i, t)
    u, s = BASE.update(g, s, x)
    return u, s, i, loss


@jax.jit
def _still(x, s, i, t):
    return jax.tree.map(jnp.zeros_like, x), s, i, jnp.asarray(1.0) + i


def training(dtype=jnp.float32):
    """Every worker takes steps of SGD with momentum."""
    return Training(lambda i: (start(dtype), BASE.init(start(dtype)), jnp.int32(i)), _step)


def resting(apart=1.0):
    """No worker moves by itself; worker i has loss 1 + i and starts at i · apart."""
    init = lambda i: (jax.tree.map(lambda x: x + i * apart, start()), (), jnp.int32(i))
    return Training(init, _still)


def moving(start, update):
    """Worker i moves by `update(x, i)` in every step, always with loss 1."""
    step = jax.jit(lambda x, s, i, t: (update(x, i), s, i, jnp.float32(1)))
    return Training(lambda i: (start, (), jnp.int32(i)), step)


def broken(training, i, steps, value=jnp.nan):
    """The same, but that worker i's update is not finite at some of its steps.

    Momentum is as it was after a step at parameters that are not finite.
    """

    def step(x, s, own, t):
        u, after, own, loss = training.step(x, s, own, t)
        if int(own) == i and int(t) in steps:
            u = jax.tree.map(lambda u: jnp.full_like(u, value), u)
        return u, after if np.isfinite(loss) else s, own, loss

    return Training(training.init, step)


def in_lock_step(method, nodes, locals, steps):
    """The parameters of all workers, [W, n], after such steps in lock step."""
    tx = optax.chain(BASE, method)
    workers = lj.Workers(nodes, locals)
    x = workers.replicate(start())
    s, i = workers.map(tx.init)(x), workers.put(np.arange(nodes * locals))

    def step(x, s, i, t):
        loss, g = loss_and_grads(x, i, t.value)
        u, s = tx.update(g, s, x, value=loss)
        return lj.apply_updates(x, u), s

    step = workers.map(step)
    for t in range(1, steps + 1):
        x, s = step(x, s, i, lj.Shared(jnp.int32(t)))
    leaves = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(jax.device_get(x))]
    return np.concatenate(leaves, axis=1)


def vector(tree):
    """The leaves of a tree one after the other."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def stacked(workers):
    """The parameters of all workers, [W, n]."""
    return np.stack([worker.vector() for worker in workers])


def position(worker):
    """Where a worker is along one of the parameters; it starts at 0, see `resting`."""
    return worker.vector()[-1].item()


def noting(value):
    """An `observe` that notes a value of a worker after each step, and its notes."""
    seen = collections.defaultdict(list)
    return lambda worker: seen[worker.index].append(value(worker)), seen


def clock(worker):
    """The seconds since the run began, and the worker's steps."""
    return worker.transport.now(), worker.count


def simulate(training, method, nodes, locals, steps, seconds=(), latency=0.0, **options):
    """The workers after a simulated run on a network whose messages take `latency`.

    seconds: of each worker's steps; 1 if not given.
    """
    speeds = Speeds(1.0, slow=dict(enumerate(seconds)))
    network = dataclasses.replace(NETWORKS["free"], latency=latency, inside_latency=latency)
    return simulator.run(
        training, method, nodes, locals, steps, network, speeds, **options
    ).workers
