"""A chain whose exchange is a program of its own: `Exchange.defer` and `arrive`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import COLLECTIVE, METHODS, RULES, UNLIKE, mostly_slow

import lsgd_jax as lj


BASE = optax.adam(0.05)
STEPS = 8
SHAPES = {"w": ((4, 40, 20), np.float32), "b": ((4, 4), np.float32)}
SHAPES |= {"h": ((4, 4, 6), jnp.bfloat16)}


def draw(seed):
    normal = np.random.default_rng(seed).normal
    return {
        name: normal(size=shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()
    }


@functools.cache
def targets():
    """Worker 1 has no finite loss at step 3, and worker 2 neither loss nor step at 5."""
    found = [draw(t) for t in range(1, STEPS + 1)]
    found[2]["w"][1] = np.nan
    found[4]["w"][2, 0, 0] = np.inf
    return found


@functools.cache
def workers():
    return lj.Workers(2, 2, devices=jax.devices()[:4])


def gradients_of(params, target):
    grads = jax.tree.map(jnp.subtract, params, target)
    return grads, (optax.tree.norm(grads, squared=True) / 2).astype(jnp.float32)


def programs_of(method):
    """The whole step, the step without its exchange, and the exchange."""
    tx = optax.chain(BASE, method)

    def whole(params, state, target):
        grads, loss = gradients_of(params, target)
        updates, state = tx.update(grads, state, params, loss=loss, grad=grads)
        return lj.apply_updates(params, updates), state

    def defer(params, state, target):
        grads, loss = gradients_of(params, target)
        of_base, own = state
        updates, of_base = BASE.update(grads, of_base, params)
        params, own, counts = method.defer(updates, own, params, loss=loss, grad=grads)
        return params, (of_base, own), counts

    def arrive(before, params, own, counts, phase):
        return method.arrive(before, params, own, counts, phase=phase)

    each = workers().map(arrive, static="phase")
    return workers().map(whole), workers().map(defer), each


def check_same(found, expected):
    """Asserts that all is equal, but for what only a program with the exchange knows.

    Those are the bytes of an exchange, and where the step has left some elements.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected))
    for (path, x), y in pairs:
        name = jax.tree_util.keystr(path)
        is_unknown = ("bytes_each" in name and not x.any()) or (
            "expected" in name and np.isinf(x).all()
        )
        if not is_unknown:
            np.testing.assert_array_equal(x, y, err_msg=name)


PULLING = {
    name: functools.partial(METHODS[name].make, 4)
    for name in RULES
    if not (METHODS[name].first or METHODS[name].around)
}
SEPARABLE = {name: make for name, make in PULLING.items() if make().is_separable}
CASES = {name: SEPARABLE[name] for name in ("local_sgd", *UNLIKE) if name in SEPARABLE} | {
    "fragments": lambda: lj.diloco(4, fragments=2),
    "equal fragments": lambda: lj.diloco(4, fragments=2, scan_axis={"h": 0}),
    "two levels as int8": lambda: lj.lsgd(0.3, 0.2, 2, 4, wire="int8"),
    "host": lambda: lj.diloco(2, memory="host"),
    "changing periods": lambda: lj.local_sgd(lj.Periods({0: 1, 3: 2}), after=2),
}


@pytest.mark.parametrize("name", mostly_slow(CASES, ["local_sgd"]))
def test_the_bits_are_those_of_the_chain(name):
    """Also of workers that are not finite, of bfloat16, and of all counters."""
    method = CASES[name]()
    whole, defer, arrive = programs_of(method)
    params = workers().put(draw(0))
    state = workers().map(optax.chain(BASE, method).init)(params)
    expected = params, state
    for t, target in enumerate(map(workers().put, targets()), start=1):
        expected = whole(*expected, target)
        before = params
        params, state, counts = defer(params, state, target)
        phase = method.phase(t, workers().sizes)
        if phase != lj.Phase():
            of_base, own = state
            params, own = arrive(before, params, own, counts, phase=phase)
            state = of_base, own
        check_same((params, state), expected)
    (*_, level) = lj.diagnostics(state)
    assert level.exchanges and not level.misplaced.any()
    # Parameters that another program has moved are noticed.
    params, state = expected
    moved = jax.tree.map(lambda x: x + 1, params)
    _, (_, own), _ = defer(moved, state, target)
    assert own.misplaced.tolist() == [1] * 4


def test_the_step_sends_nothing_and_an_omitted_exchange_counts_as_misplaced():
    method = lj.local_sgd(2)
    _, defer, _ = programs_of(method)
    params = workers().put(draw(0))
    state = workers().map(optax.chain(BASE, method).init)(params)
    target = workers().put(targets()[0])
    text = defer.lower(params, state, target).compile().as_text()
    assert not COLLECTIVE.search(text) and " conditional(" not in text
    for misplaced in (0, 0, 1):
        params, state, _ = defer(params, state, target)
        assert state[1].misplaced.tolist() == [misplaced] * 4
    assert int(state[1].count.value) == 3


@pytest.mark.parametrize(
    "method",
    [
        lj.diloco(4, delay=1),
        lj.sgp(),
        lj.easgd(order="combine_then_adapt"),
        lj.local_sgd(4, check="every_step"),
        lj.contrib.palsgd(2),
    ],
)
def test_methods_that_need_whole_steps(method):
    assert not method.is_separable
