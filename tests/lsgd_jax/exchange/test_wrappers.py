"""The claims of docs/own_loop.md about optax's wrappers and the order of a chain."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import FACTORIES, check_found_by_optax, close, mostly_slow, needed
from jax import lax

import lsgd_jax as lj


STEPS = 6
SHAPES = {"a": (3,), "b": (2,)}


def train(tx, devices=8):
    """Returns the parameters of 8 workers after a few steps, and the optimizer's state."""
    workers = lj.Workers(nodes=2, locals=4, devices=jax.devices()[:devices])
    draw = np.random.default_rng(0).normal
    tree = lambda: {k: draw(size=(8, *s)).astype(np.float32) for k, s in SHAPES.items()}
    away = lambda x, goal: jax.tree.map(jnp.subtract, x, goal)
    goals = [tree() for _ in range(STEPS)]
    seen, state = harness.train(tx, workers, tree(), goals, gradient=away)
    return seen[-1], state


def misplaced(state):
    """Returns the number of misplaced steps of each worker, by pull."""
    return [pull.misplaced.tolist() for pull in lj.diagnostics(state)]


@functools.cache
def train_by_hand(tx):
    return train(tx)[0]


def every_second_time(tx):
    """`MultiSteps` by hand: every second step uses the mean gradient of two steps."""

    def init(params):
        count = lj.Shared(jnp.int32(0))
        return count, optax.tree.zeros_like(params), tx.init(params)

    def update(grads, state, params, **extra):
        count, before, inner = state
        mean = jax.tree.map(lambda x, y: (x + y) / 2, before, grads)
        moved = lambda: tx.update(mean, inner, params, **extra)
        stayed = lambda: (optax.tree.zeros_like(grads), inner)
        updates, inner = lax.cond(count.value % 2 == 1, moved, stayed)
        return updates, (lj.Shared(count.value + 1), grads, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def by_name(tx_a, tx_b):
    """Updates leaf "a" by one optimizer and leaf "b" by another."""

    def init(params):
        return tx_a.init({"a": params["a"]}), tx_b.init({"b": params["b"]})

    def update(grads, state, params, **extra):
        (a, state_a), (b, state_b) = (
            tx.update({k: grads[k]}, s, {k: params[k]}, **extra)
            for tx, k, s in zip((tx_a, tx_b), "ab", state)
        )
        return a | b, (state_a, state_b)

    return optax.GradientTransformationExtraArgs(init, update)


SGD = optax.sgd(0.1)
LOCAL_SGD = optax.chain(SGD, lj.local_sgd(2))
EVERY_STEP = optax.chain(SGD, lj.local_sgd(1))
ONLY_A = by_name(LOCAL_SGD, SGD)
MASK = {"a": True, "b": False}

WRAPPED = {
    "MultiSteps": (optax.MultiSteps(EVERY_STEP, 2), every_second_time(EVERY_STEP)),
    "conditionally_transform": (
        optax.chain(
            SGD, optax.conditionally_transform(lj.local_sgd(1), lambda t: t % 2 == 1)
        ),
        LOCAL_SGD,
    ),
    "masked": (optax.chain(SGD, optax.masked(lj.local_sgd(2), MASK)), ONLY_A),
    "partition": (
        optax.partition({"x": LOCAL_SGD, "y": SGD}, {"a": "x", "b": "y"}),
        ONLY_A,
    ),
    "inject_hyperparams": (
        optax.chain(
            SGD,
            optax.inject_hyperparams(lj.easgd, lj.static_args(lj.easgd))(0.5, period=2),
        ),
        optax.chain(SGD, lj.easgd(beta=0.5, period=2)),
    ),
    "named_chain": (
        optax.named_chain(("base", SGD), ("exchange", lj.local_sgd(2))),
        LOCAL_SGD,
    ),
    "apply_if_finite around the base": (
        optax.chain(optax.apply_if_finite(SGD, 5), lj.local_sgd(2)),
        LOCAL_SGD,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_method_computes_the_same_on_every_layout(name):
    wrapped, by_hand = WRAPPED[name]
    expected = train_by_hand(by_hand)
    # On 8, 4, 2, 1 devices: no axis, a part of one, one axis, and both are in a device.
    for devices in (8, 4, 2, 1) if name == "MultiSteps" else (2,):
        params, state = train(wrapped, devices)
        close(params, expected)
        # A step that bypasses the exchange moves x without its knowledge.
        passed_by = STEPS // 2 - 1 if name == "conditionally_transform" else 0
        assert misplaced(state) == [[passed_by] * 8]


@pytest.mark.parametrize("method", FACTORIES, ids=lambda method: method.__name__)
def test_arguments_outside_of_static_args_may_be_injected(method):
    tx = optax.inject_hyperparams(method, lj.static_args(method))(**needed(method))
    workers = lj.Workers(nodes=1, locals=2)
    step = workers.map(lambda x: tx.update(x, tx.init(x), x, value=x.sum())[0])
    assert jax.eval_shape(step, workers.replicate(jnp.ones(3))).shape == (2, 3)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.apply_if_finite(tx, 5),
        lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite),
        lambda tx: optax.conditionally_mask(tx, lambda t, value: value < 1, True),
    ],
    ids=["apply_if_finite", "skip_not_finite", "conditionally_mask on a loss"],
)
def test_a_wrapper_that_decides_per_worker_is_refused(wrap):
    with pytest.raises(ValueError, match="would wait for each other forever"):
        train(wrap(LOCAL_SGD))


def put_back(tx):
    """A step as in loss scaling: one that is not finite is undone on its worker."""

    def step(x, state, grads, phase=None):
        updates, after = tx.update(grads, state, x, phase=phase)
        keep = functools.partial(jnp.where, jnp.isfinite(grads).all())
        return keep(x + updates, x), jax.tree.map(keep, after, state)

    return step


def test_a_state_that_is_put_back_on_one_worker_is_refused_with_the_way_out():
    workers, x = lj.Workers(1, 2), jnp.zeros([2, 3])
    with pytest.raises(ValueError, match=r"`.*count.value may differ.*`lj.around\(step, "):
        workers.map(put_back(LOCAL_SGD))(x, workers.map(LOCAL_SGD.init)(x), x)


@pytest.mark.slow
def test_a_state_that_is_put_back_does_not_hang_in_a_program_for_each_phase():
    """Under `pmap`, where nothing is refused. Without phases the program would hang."""
    method = lj.local_sgd(2, axes="batch")
    tx = optax.chain(SGD, method)
    step = jax.pmap(put_back(tx), axis_name="batch", static_broadcasted_argnums=3)
    x = jnp.array([[1.0], [3.0]])
    state = jax.pmap(tx.init, axis_name="batch")(x)
    x, state = step(x, state, jnp.array([[0.0], [jnp.nan]]), method.phase(1))
    assert x.tolist() == [[1], [3]] and state[-1].count.value.tolist() == [1, 0]
    x, state = step(x, state, jnp.zeros([2, 1]), method.phase(2))
    assert x.tolist() == [[2], [2]]
    assert lj.diagnostics(state)[0].misplaced.tolist() == [0, 1]


ADAM = optax.adam(0.1)
BY_TURNS = {"fragments": 2, "scan_axis": 0, "delay": 1, "wire": "int8"}
FLOATS = {"w": True, "b": True, "count": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(ADAM, lj.diloco(4, part=["w"], **BY_TURNS)),
        optax.chain(ADAM, lj.lsgd(0.1, 0.1, 4, 8, local_proximal=0.1, **BY_TURNS)),
        optax.chain(ADAM, lj.easgd(0.1, 4, wire=lj.TopK(0.5), part=FLOATS)),
        optax.masked(optax.chain(ADAM, lj.diloco(4, fragments=2)), FLOATS),
        optax.partition({True: optax.chain(ADAM, lj.slowmo(4)), False: ADAM}, FLOATS),
        lj.with_state(ADAM, lj.diloco(4, **BY_TURNS), "mu", "nu"),
        lj.contrib.desloc(ADAM, 4, {"mu": 4}, part=["w"]),
        lj.outer(lj.diloco(4, **BY_TURNS)),
    ],
)
def test_optax_finds_the_trees_like_the_parameters_in_a_wrapped_state(tx):
    check_found_by_optax(tx, lj.Workers(2, 2, devices=jax.devices()[:4]))


def test_optax_finds_the_anchors_of_nodes_by_the_init_of_all_workers():
    workers = lj.Workers(2, 2, devices=jax.devices()[:4])
    tx = lj.diloco(4, axes="local", fragments=2)
    check_found_by_optax(tx, workers, initable=workers.map(tx.init))


def test_multi_steps_inside_a_chain_drops_the_loss():
    inside = optax.MultiSteps(optax.chain(SGD, lj.lsgd()), 2)
    with pytest.raises(ValueError, match="the leader is elected by each worker's loss"):
        train(optax.chain(optax.clip(1.0), inside))


WRONG_ORDER = {
    "the optimizer behind the exchange": [lj.local_sgd(2), SGD],
    "clipping behind it": [SGD, lj.local_sgd(2), optax.clip(1e-3)],
    "an exchange behind it": [SGD, lj.local_sgd(2), lj.dpsgd()],
    "the aggregation last": [SGD, lj.allreduce()],
}


# By default the aggregation; other tests move parameters behind an exchange.
@pytest.mark.parametrize("name", mostly_slow(WRONG_ORDER, fast=["the aggregation last"]))
def test_a_wrong_order_is_counted(name):
    _, state = train(optax.chain(*WRONG_ORDER[name]))
    assert min(misplaced(state)[0]) >= 1


def schedule_free(base):
    return optax.contrib.schedule_free(base, learning_rate=0.1, b1=0.9)


def apart(tree):
    return max(np.ptp(x, axis=0).max() for x in jax.tree.leaves(tree))


def test_an_exchange_does_not_move_schedule_free_iterates():
    """Every step makes the parameters equal, but not the z in the workers' states."""
    params, state = train(optax.chain(schedule_free(SGD), lj.local_sgd(1)))
    assert apart(params) < 1e-6 and apart(state[0].z) > 0.1


@pytest.mark.slow
def test_schedule_free_behind_allreduce_uses_the_mean_gradient():
    params, state = train(optax.chain(lj.allreduce(), schedule_free(SGD)))
    mean = optax.stateless(lambda grads, params: lax.pmean(grads, ("node", "local")))
    expected, _ = train(optax.chain(mean, schedule_free(SGD)))
    close(params, expected)
    assert misplaced(state) == [[0] * 8]


@pytest.mark.slow  # `test_a_wrong_order_is_counted` has a wrong place in a chain
def test_an_exchange_inside_schedule_free_is_not_last():
    _, state = train(schedule_free(LOCAL_SGD))
    assert min(misplaced(state)[0]) >= 1
