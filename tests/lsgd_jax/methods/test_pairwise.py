"""Averaging with one peer (dpwa), and GoSGD."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import close, make, mass, rule_of

import lsgd_jax as lj
from lsgd_jax._src.methods.pairwise import part_taken


def peer(x, hop):
    """Returns x_{i - hop} for every worker i."""
    return jnp.roll(x, hop, axis=0)


def test_pairwise_constant_schedule():
    run = make(lj.pairwise(value=lambda t: 0.1 * t), 4)
    seen, _ = run.still(2, run.start)
    x = run.start["w"]
    for t, hop in ((1, 1), (2, 2)):
        x = 0.1 * t * peer(x, hop) + (1 - 0.1 * t) * x
        close(seen[t - 1]["w"], np.asarray(x))


def test_pairwise_with_two_losses_of_zero_averages():
    assert part_taken("loss", *jnp.zeros(2), 0.5, 0.0) == 0.5


def test_pairwise_fetches_with_a_probability():
    still = make(lj.pairwise(fetch_probability=0.0), 4)
    close(still.still(2, still.start)[0][-1], jax.device_get(still.start))
    run = make(lj.pairwise(fetch_probability=0.5, seed=3), 4)
    before, fetched = run.start["w"], []
    for t, after in enumerate(run.still(40, run.start)[0]):
        taken = (np.asarray(before) + np.asarray(peer(before, 2 ** (t % 2)))) / 2
        same = np.abs(after["w"] - np.asarray(before)).max(axis=(1, 2)) < 1e-7
        took = np.abs(after["w"] - taken).max(axis=(1, 2)) < 1e-6
        assert (same | took).all()
        if t < 4:  # later they hardly differ
            fetched.append(took & ~same)
        before = jnp.asarray(after["w"])
    assert 2 <= np.sum(fetched) <= 14
    assert len({tuple(row) for row in fetched}) > 1  # drawn anew each step


@pytest.mark.slow  # `test_methods_conformance.py` has a peer that is not finite
@pytest.mark.parametrize("interpolation", ["constant", "clock", "loss"])
def test_pairwise_ignores_a_peer_that_is_not_finite(interpolation):
    run = make(lj.pairwise(interpolation), 4)
    x = run.start["w"]
    with_nan = jax.tree.map(lambda t: t.at[1].set(jnp.nan), run.start)
    seen, state = run.train([with_nan])
    close(seen[0]["w"][2], np.asarray(x[2]))  # its peer is worker 1
    close(seen[0]["w"][1], np.asarray(x[0]))  # restored from its own peer
    assert np.isfinite(np.asarray(rule_of(state).measure)[[0, 2, 3]]).all()


def test_gosgd_conserves_weights_and_weighted_parameters():
    run = make(lj.contrib.gosgd(send_probability=0.5, seed=1), 4)
    params = run.workers.put(run.start)
    before = mass(params, run.init(params))
    seen, state = run.still(6, run.start)
    close(mass(seen[-1], state), before)
    assert np.ptp(np.asarray(rule_of(state).weight)) > 0.1
    assert np.abs(seen[-1]["w"] - np.asarray(run.start["w"])).max() > 0.1
