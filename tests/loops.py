"""A small training run for loops on the host: a step around an optimizer, and its data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import GUARDED

import lsgd_jax as lj


BASE = GUARDED(optax.sgd(0.05, momentum=0.9))
STEPS = 9
BAD = 1  # this worker is not finite at the third step


def update(state, target):
    """Towards the target: (state, loss)."""
    grads = jax.tree.map(jnp.subtract, state["params"], target)
    loss = optax.tree.norm(grads, squared=True).astype(jnp.float32) / 2
    updates, opt_state = BASE.update(grads, state["opt_state"], state["params"])
    params = lj.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, loss


def start(params):
    return {"params": params, "opt_state": BASE.init(params)}


def draw(seed, W):
    normal = np.random.default_rng(seed).normal
    shapes = {"w": (W, 4, 2), "b": (W, 4), "c": (W, 3)}
    return {name: normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@functools.cache
def targets_of(W):
    targets = [draw(t, W) for t in range(STEPS)]
    targets[2]["w"][BAD % W] = np.nan
    return targets


@functools.cache
def workers_of(W):
    return lj.Workers(max(1, W // 2), min(W, 2), devices=jax.devices()[:W])


def begun(train, workers, start=start):
    params = workers.put(draw(100, workers.num_workers))
    return workers.map(lambda x: train.init(start(x)))(params)


def state_in(results):
    def is_state(node):
        return isinstance(node, lj.AroundState)

    return next(filter(is_state, jax.tree.leaves(results, is_leaf=is_state)))


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def both(state, target):
    """Of two networks; the state is not the first one of its results."""
    toward = lambda x, goal: x - 0.25 * (x - goal)
    after = {name: jax.tree.map(toward, state[name], target) for name in state}
    return {"loss": optax.tree.sum(target), "state": after}


def both_starts(params):
    return {"one": params, "two": params}


def sharded_steps(train, workers, run, steps):
    """Yields the states of a loop and of a step by phases, with shards inside a worker."""
    specs = lj.layouts.largest_dimension("fsdp", 2, smallest=1)
    params = {"w": np.ones((8, 512), np.float32), "b": np.ones((512, 6), np.float32)}
    begin = lambda: workers.map(train.init)(workers.replicate(start(params), specs))
    step = workers.map(train, static="phase")
    state = begin()
    other = begin()
    for t in range(1, steps + 1):
        rows = {name: np.stack([x * t, x + t]) for name, x in params.items()}
        target = workers.put(rows, specs)
        state, _ = run(state, target)
        other, _ = step(other, target, phase=train.phase(t))
        yield state, other
