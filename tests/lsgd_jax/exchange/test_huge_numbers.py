"""Workers with finite but huge parameters: they harm no other worker, and are restored."""

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import aggregate, mostly_slow, train

import lsgd_jax as lj


WORKERS = lj.Workers(nodes=2, locals=4)
START = np.linspace(1, 2, 32).reshape(8, 4).astype(np.float32)
OVERFLOWS = {
    "local_sgd": lj.local_sgd(1),
    "diloco": lj.diloco(1),
    "weighted": lj.diloco(1, weights=range(1, 9)),
    "slowmo": lj.slowmo(1, alpha=1.0, beta=0.5, learning_rate=0.1),
    "easgd": lj.easgd(0.43, 1),
    "downpour": lj.downpour(1),
    "parle": lj.parle(0.0, 1, decay=0.0, outer_learning_rate=1.0),
    "noloco": lj.contrib.noloco(1, beta=2.0),
    "int8": lj.diloco(1, wire="int8"),
}


def run(tx, moves, dtype=jnp.float32):
    """One row per move: parameters, then the last state."""
    moves = [np.asarray(move, dtype) for move in moves]
    seen, state = train(tx, WORKERS, START.astype(dtype), moves)
    return [np.asarray(x, np.float32) for x in seen], state


def by(value, *workers):
    move = np.zeros_like(START)
    move[list(workers)] = value
    return move


@pytest.mark.parametrize("name", mostly_slow(OVERFLOWS, fast=["diloco"]))
def test_workers_too_huge_to_be_added_up_count_as_not_finite(name):
    """They take the target whole at once, and the others' mean is as without them."""
    seen, state = run(OVERFLOWS[name], [by(3e38, 3, 4), *[by(0.1, 0)] * 4])
    chex.assert_tree_all_finite((seen, state))
    assert 0 < seen[0].min() and seen[0].max() < 3
    restored = sum(pull.restored for pull in lj.diagnostics(state))
    assert np.flatnonzero(restored).tolist() == [3, 4]
    dropped = sum(pull.dropped for pull in lj.diagnostics(state))
    assert not np.asarray(dropped).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [lj.local_sgd(2, delay=1), lj.diloco(2, delay=1)],
)
def test_behind_a_delayed_message_no_element_takes_a_target_that_overflows(tx):
    """The gradient does not wait for a test of all numbers, so the other elements move."""
    moves = [by(3e38, 3, 4), by(-3e38, 3, 4), *[by(0.0, 0)] * 4]
    seen, state = run(tx, moves)
    chex.assert_tree_all_finite((seen, state))
    assert -1 < seen[-1].min() and seen[-1].max() < 4


def test_float16_takes_no_target_beyond_its_range():
    """The mean is in float32, where 1e5 is finite."""
    tx = lj.exchange(lj.Pull(lj.rules.anchored(optax.sgd(200.0)), 1.0))
    (seen,), state = run(tx, [by(5000.0, 3)], jnp.float16)
    start = START.astype(np.float16) + by(5000, 3).astype(np.float16)
    np.testing.assert_array_equal(seen, start)
    assert (np.asarray(lj.diagnostics(state)[0].dropped) == 1).all()


@pytest.mark.parametrize("merge", mostly_slow(["mean", "radial"], fast=["radial"]))
def test_pseudo_gradients_of_any_size_merge(merge):
    """All workers move alike, so that both merges are the move itself."""
    tx = lj.diloco(1, optax.sgd(1.0), merge=merge)
    for size in 1e-30, 1.0, 1e20:
        (seen,), _ = train(tx, WORKERS, 0 * START, [np.full_like(START, size)])
        np.testing.assert_allclose(seen, size, rtol=1e-5)


FAR = {"geometric_median": {}, "krum": {"faulty": 2}, "trimmed_mean": {"cut": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAR)
def test_two_huge_workers_of_eight_do_not_move_a_robust_mean(kind):
    tx = lj.exchange(lj.Pull(lj.rules.robust_mean(kind, **FAR[kind]), 1.0))
    for size in (1e20, 3e38):
        (seen,), _ = run(tx, [by(size, 3, 5)])
        assert (seen == seen[0]).all() and 1 <= seen.min() and seen.max() <= 2


@pytest.mark.parametrize("scale", mostly_slow([1e-36, 1.0, 1e30], fast=[1e30]))
def test_fewer_than_half_cannot_move_the_geometric_median_far(scale):
    good = np.random.default_rng(0).normal(size=(5, 6))
    for attackers, size in ((3, 1e6), (2, 1e7)):  # of 8, and of 7
        rows = np.concatenate([good, np.full((attackers, 6), size)]) * scale
        seen = aggregate(
            lj.robust.geometric_median(), {"a": jnp.asarray(rows, jnp.float32)}
        )
        assert np.abs(seen["a"]).max() < 3 * scale
