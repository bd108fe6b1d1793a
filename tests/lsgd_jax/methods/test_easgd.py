"""EASGD: the sum that a step conserves, and its center, also of narrow parameters."""

import jax
import jax.numpy as jnp
import numpy as np
from harness import close, make, mean, rule_of

import lsgd_jax as lj


def total(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64).sum(axis=0), tree)


def test_easgd_conserves_the_sum_without_a_worker_that_is_not_finite():
    """That worker's share of β stays with the center."""
    run = make(lj.easgd(beta=0.8, period=1), 4)
    params = run.workers.put(run.start)
    with_nan = jax.tree.map(lambda x: x.at[2].set(jnp.nan), run.start)
    state = run.init(params)
    after, state = run.compiled(params, state, run.workers.put(with_nan))
    lost = jax.tree.map(lambda x: x[jnp.array([0, 1, 3])], run.start)
    moved = jax.tree.map(lambda x, t: x - 0.1 * (x - t), lost, lost)
    kept = jax.tree.map(lambda x: np.asarray(x)[[0, 1, 3]], after)
    center = jax.device_get(lj.center(after, state))
    before = jax.tree.map(np.add, total(moved), mean(run.start))
    # The other workers had their own start as target, and so zero gradients.
    close(before, jax.tree.map(np.add, total(kept), center))
    close(jax.tree.map(lambda x: np.asarray(x)[2], after), mean(run.start))


def test_easgd_center_follows_its_rule():
    beta = lambda t: 0.1 * t
    run = make(lj.easgd(beta, period=2), 4)
    x, c = np.asarray(run.start["w"]), mean(run.start)["w"]
    seen, state = run.train()
    for t, target in enumerate(run.batches, 1):
        x = y = x - 0.1 * (x - np.asarray(target["w"]))
        if t % 2 == 0:
            x = y - beta(t) / 4 * (y - c)
            c = (1 - beta(t)) * c + beta(t) * y.mean(axis=0)
        close(seen[t - 1]["w"], x)
    close(np.asarray(lj.center(seen[-1], state)["w"]), c)


def test_bfloat16_center_moves_by_less_than_a_rounding_step():
    """The center is kept in float32; in bfloat16, a small β could never move it."""
    run = make(lj.easgd(beta=1e-3, period=1), 4, dtype=jnp.bfloat16)
    start = jax.tree.map(jnp.ones_like, run.start)
    targets = jax.tree.map(lambda x: 0 * x + 3, run.start)
    seen, state = run.train([targets] * 4, start)
    center = rule_of(state).center.value["b"]
    assert center.dtype == jnp.float32 and 1.0 < float(center[0]) < 1.004
    assert lj.center(seen[-1], state)["b"].dtype == jnp.bfloat16
