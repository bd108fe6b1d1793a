"""loop: the exchange as a program of its own, run by a host that counts the steps."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import GUARDED, METHODS, SGD, exchanges, mostly_slow

import lsgd_jax as lj


BASE = GUARDED(optax.adam(0.05))
STEPS = 9
BAD = 1  # this worker is not finite at the third step


def update(state, target):
    """Towards the target: (state, loss)."""
    grads = jax.tree.map(jnp.subtract, state["params"], target)
    loss = optax.tree.norm(grads, squared=True).astype(jnp.float32) / 2
    updates, opt_state = BASE.update(grads, state["opt_state"], state["params"])
    params = lj.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, loss


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


def begun(train, workers):
    params = workers.put(draw(100, workers.num_workers))
    start = lambda x: {"params": x, "opt_state": BASE.init(x)}
    return workers.map(lambda x: train.init(start(x)))(params)


def by_phase(train, workers, steps=STEPS):
    """All results of the loop that passes the phases itself."""
    step, state = workers.map(train, static="phase"), begun(train, workers)
    for t, target in enumerate(targets_of(workers.num_workers)[:steps], start=1):
        phase = train.phase(t, workers.sizes)
        state, loss = step(state, workers.put(target), phase=phase)
        yield state, loss


def check_loop(train, W=4):
    """Asserts that a loop returns what the phases do, bit for bit; returns the loop."""
    workers = workers_of(W)
    run, state = workers.loop(train), begun(train, workers)
    expected = list(by_phase(train, workers))
    for target, there in zip(targets_of(W), expected):
        found = run(state, workers.put(target))
        assert jax.tree.structure(found) == jax.tree.structure(there)
        jax.tree.map(np.testing.assert_array_equal, found, there)
        state, _ = found
    assert not any(level.misplaced.any() for level in lj.diagnostics(state))
    return run


def programs(run):
    return {key: program._cache_size() for key, program in run._programs.items()}


PULLING = [
    name
    for name, method in METHODS.items()
    if not (method.first or method.around) and not name.startswith("palsgd")
]
METHODS_OF = {name: functools.partial(METHODS[name].make, 4) for name in PULLING} | {
    "fragments": lambda: lj.diloco(4, fragments=2),
    "equal fragments": lambda: lj.diloco(4, fragments=2, scan_axis=0),
    "two levels as int8": lambda: lj.lsgd(0.3, 0.2, 2, 4, wire="int8"),
    "changing periods": lambda: lj.local_sgd(lj.Periods({0: 1, 3: 2}), after=2),
    "host": lambda: lj.diloco(2, memory="host"),
}
FAST = ["lsgd", "diloco+int4", "changing periods"]


@pytest.mark.parametrize("name", mostly_slow(METHODS_OF, FAST))
def test_the_numbers_are_those_of_the_phases(name):
    """Of all methods that pull, also with a worker that is not finite."""
    train = lj.around(update, METHODS_OF[name]())
    run = check_loop(train)
    compiled = programs(run)
    assert set(compiled.values()) == {1}
    phases = {train.phase(t, workers_of(4).sizes) for t in range(1, STEPS + 1)}
    if run._train.is_separable:
        assert len(compiled) == 1 + len(phases - {lj.Phase()})
    else:
        assert len(compiled) == len(phases)
