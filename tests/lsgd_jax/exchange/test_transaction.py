"""Exchanges whose results are not finite change nothing, and the next one works again."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import (
    EXACT_KINDS,
    KINDS,
    METHODS,
    in_turn,
    mostly_slow,
    of_each,
    run_of,
    train,
)

import lsgd_jax as lj


WORKERS = lj.Workers(nodes=1, locals=2)
START = np.array([[1.0, 2.0], [1.0, 2.0]], np.float32)
MOVES = np.array([[0.5, 0.25], [0.25, 0.5]], np.float32)  # of both workers, on every step


def zero_at(*steps):
    """A learning rate that is 0 at these steps, and 0.1 at all others."""
    return lambda t: jnp.where(jnp.isin(t, jnp.array(steps)), 0.0, 0.1)


def nan_at(step, value):
    return lambda t: jnp.where(t == step, jnp.nan, value)


def outer_of(rate):
    """DiLoCo whose outer learning rate is a schedule of the exchanges before, 0, 1, …."""
    trace = optax.trace(0.9)
    return lj.diloco(2, optax.chain(trace, optax.scale_by_schedule(rate)))


# Each has a fault at the first exchange, at step 2, and then never again.
DROPPED = {
    "diloco, a rate that divides by 0": outer_of(lambda k: -0.5 / k),
    "diloco, an injected rate": lj.diloco(
        2, optax.inject_hyperparams(optax.sgd)(nan_at(0, 0.5))
    ),
    "easgd, beta": lj.easgd(nan_at(2, 0.5), 2),
    "easgd, beta, in the other order": lj.easgd(
        nan_at(2, 0.5), 2, order="combine_then_adapt"
    ),
    "pull, lambda": lj.exchange(
        lj.Pull(lj.rules.anchored(optax.sgd(1.0)), nan_at(2, 0.5), every=2)
    ),
    "int8": lj.diloco(2, optax.scale_by_schedule(nan_at(0, -0.5)), wire="int8"),
    "int8, with a reference": lj.exchange(
        lj.Pull(lj.rules.average(), nan_at(2, 1.0), every=2, wire="int8")
    ),
    "parle": lj.parle(0.1, 2, outer_learning_rate=nan_at(2, 0.1)),
    "a part": lj.exchange(lj.Pull(lj.rules.average(), nan_at(2, 1.0), every=2, part=["0"])),
}
# By default an anchor, a center and errors of rounding.
DROPPED_FAST = ["easgd, beta", "int8"]


def arrays_of(state):
    """The arrays of float32 that an exchange changes, without quantization errors."""
    references = [pull.wire.reference for pull in state.pulls if pull.wire]
    leaves = jax.tree.leaves(([pull.rule for pull in state.pulls], references))
    return [x for x in leaves if x.dtype == jnp.float32 and x.ndim]


@pytest.mark.parametrize("name", mostly_slow(DROPPED, fast=DROPPED_FAST))
def test_an_exchange_that_is_not_finite_changes_nothing_and_the_next_one_works(name):
    tx = DROPPED[name]
    seen, state = train(tx, WORKERS, [START], [[MOVES]] * 2)
    (pull,) = lj.diagnostics(state)
    assert pull.dropped.tolist() == pull.dropped_in_a_row.tolist() == [1, 1]
    if name != "parle":  # whose own steps pull and average, too
        np.testing.assert_array_equal(seen[1][0], START + 2 * MOVES)
        before = WORKERS.map(tx.init)(WORKERS.put([START]))
        chex.assert_trees_all_equal(arrays_of(state), arrays_of(before))

    later, state = train(tx, WORKERS, seen[-1], [[MOVES]] * 4, state=state)
    chex.assert_tree_all_finite((later, arrays_of(state)))
    (pull,) = lj.diagnostics(state)
    assert pull.dropped.tolist() == [1, 1] and not pull.dropped_in_a_row.any()
    apart = np.abs(later[-1][0][0] - later[-1][0][1]).max()
    assert apart < np.abs(6 * (MOVES[0] - MOVES[1])).max() - 0.1


RATES = {
    "warm-up": zero_at(2),
    "decay": zero_at(4),
    "always": zero_at(2, 4, 6),
    "constant": 0.0,
}


@pytest.mark.parametrize("name", mostly_slow(RATES, fast=["warm-up"]))
def test_slowmo_goes_on_where_the_learning_rate_is_0(name):
    """By hand: where η is 0, a moves by the workers' mean move alone."""
    rate = RATES[name]
    tx = lj.slowmo(2, alpha=1.0, beta=0.5, learning_rate=rate)
    seen, state = train(tx, WORKERS, START, [MOVES] * 6)
    move = MOVES.mean(axis=0)
    a = START[0].astype(float)
    momentum = np.zeros(2)
    for t in (2, 4, 6):
        eta = float(rate(t)) if callable(rate) else rate
        delta = -2 * move
        a = a - (0.5 * eta * momentum + delta)
        momentum = 0.5 * momentum + (delta / eta if eta else 0)
        np.testing.assert_allclose(seen[t - 1], [a, a], rtol=1e-5)
    assert not lj.diagnostics(state)[0].dropped.any()


@pytest.mark.slow
def test_beside_a_gradient_a_target_that_is_not_finite_is_counted_when_it_lands():
    tx = lj.diloco(2, optax.scale_by_schedule(nan_at(0, -0.5)), delay=1)
    seen, state = train(tx, WORKERS, START, [MOVES] * 2)
    np.testing.assert_array_equal(seen[1], START + 2 * MOVES)
    assert lj.diagnostics(state)[0].dropped_in_a_row.tolist() == [1, 1]
    seen, state = train(tx, WORKERS, seen[1], [MOVES] * 2, state=state)
    (pull,) = lj.diagnostics(state)
    assert pull.dropped.tolist() == [1, 1] and not pull.dropped_in_a_row.any()
    np.testing.assert_array_equal(seen[1][0], seen[1][1])


OUTER = {"adam": optax.adam(0.1), "rmsprop": optax.rmsprop(0.1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTER)
def test_an_outer_optimizer_whose_squares_overflow_drops_one_exchange(name):
    """At the next one the worker that is huge counts as not finite."""
    workers = lj.Workers(nodes=1, locals=4)
    start = np.tile(START[:1], (4, 1))
    tx = lj.diloco(2, OUTER[name])
    still = np.zeros_like(start)
    huge = np.where(np.arange(4)[:, None] == 1, 1e21, still).astype(np.float32)
    seen, state = train(tx, workers, start, [huge, still])
    np.testing.assert_array_equal(seen[1], start + huge)
    assert lj.diagnostics(state)[0].dropped_in_a_row.tolist() == [1, 1, 1, 1]
    seen, state = train(tx, workers, seen[1], [still] * 4, state=state)
    np.testing.assert_allclose(seen[1][[0, 2, 3]], start[1:], atol=1e-6)
    # 1e21 + (1 - 1e21) is 0, so the worker takes the next target whole, too.
    np.testing.assert_array_equal(seen[1][1], 0)
    np.testing.assert_allclose(seen[-1], start, atol=1e-6)
    (pull,) = lj.diagnostics(state)
    assert pull.restored.tolist() == [0, 2, 0, 0] and not pull.dropped_in_a_row.any()


@of_each(
    [name for name in KINDS if not METHODS[name].first],
    fast=["lsgd", "easgd", "diloco_streaming", "sgp", "diloco+int4"],
)
def test_after_a_worker_was_huge_once_exchanges_go_on(name):
    """Its loss is finite, so only its parameters tell."""
    for size in (3e37, 1e21):
        check_that_exchanges_go_on(name, size)


def check_that_exchanges_go_on(name, size):
    run = run_of(name, 4, 2, 8)
    seen, state = run.train(run.batches[:2])
    params = jax.tree.map(np.array, seen[-1])
    params["w"][1] = params["b"][1, 0] = size
    put = run.workers.put
    params = put(params)
    for _ in range(9):
        # The gradient is 0 where a worker is at its target.
        params, state = run.compiled(params, state, params)
    chex.assert_tree_all_finite((params, state))
    pulls = lj.diagnostics(state)
    assert not sum(pull.dropped_in_a_row for pull in pulls).any()
    adds_up = not name.startswith(("lsgd", "robust"))
    if size > 1e35 and adds_up:
        assert sum(pull.restored for pull in pulls)[1] >= 1
        assert max(np.abs(x).max() for x in jax.tree.leaves(params)) < 10


def is_plain(name):
    """Whether the pulls of a method take any period, delay and strength."""
    method = METHODS[name]
    return not method.first and isinstance(method.make(2), lj.Exchange)


PLAIN = [name for name in ("local_sgd", *EXACT_KINDS, "diloco+int4") if is_plain(name)]
RANDOM = "pairwise"  # a worker may meet no other one


def with_pulls(name, **changes):
    """The method of a row with other arguments of its pulls, which are all due at once."""
    pulls = [each for pull in METHODS[name].make(2).pulls for each in pull.each]
    return lj.exchange(*(dataclasses.replace(x, offset=0, **changes) for x in pulls))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_a_strength_that_is_nan_once_moves_no_worker(name):
    tx = with_pulls(name, every=2, delay=0, late="replace", strength=nan_at(2, 0.5))
    x = {"w": START, "b": START}
    moves = {"w": MOVES, "b": MOVES}
    before, state = train(tx, WORKERS, x, [moves])
    seen, state = train(tx, WORKERS, before[-1], [moves], state=state)
    if not name.startswith("parle"):  # whose own steps pull, too
        np.testing.assert_allclose(seen[-1]["w"], START + 2 * MOVES, rtol=1e-6)
    counts = [pull.dropped_in_a_row.tolist() for pull in lj.diagnostics(state)]
    assert counts == [[1, 1]] * len(counts)
    seen, state = train(tx, WORKERS, seen[-1], [moves] * 2, state=state)
    chex.assert_tree_all_finite((seen, arrays_of(state)))
    assert not sum(pull.dropped_in_a_row for pull in lj.diagnostics(state)).any()
    if not name.startswith(RANDOM):
        assert np.ptp(seen[-1]["w"], axis=0).max() < 1 - 0.05


SAVED = [("local_sgd", 6), *in_turn(PLAIN, (5, 6))]


@pytest.mark.parametrize("name, saved_at", mostly_slow(SAVED, fast=[("local_sgd", 5)]))
def test_a_resume_with_another_period_in_a_delay_undoes_no_steps(name, saved_at):
    """The message of step 5 that had not left when the run was saved is no target.

    One that had left is, but the next agreement, about step 10, comes before a landing.
    """
    x = {"w": START, "b": START}
    moves = {"w": MOVES, "b": MOVES}
    before = with_pulls(name, every=8, delay=3, strength=0.5)
    seen, state = train(before, WORKERS, x, [moves] * saved_at)
    after = with_pulls(name, every=6, delay=2, strength=0.5)
    steps = 13 - saved_at
    state = jax.device_get(state)
    later, state = train(after, WORKERS, seen[-1], [moves] * steps, state=state)
    chex.assert_tree_all_finite((later, arrays_of(state)))
    if not name.startswith("parle"):  # whose own steps pull, too
        alone = [START + t * MOVES for t in range(saved_at + 1, 12)]
        given = [seen["w"] for seen in later[: len(alone)]]
        np.testing.assert_allclose(given, alone, rtol=1e-5)
    if not name.startswith(RANDOM):
        assert np.ptp(later[-1]["w"], axis=0).max() < 13 / 4 - 0.05
