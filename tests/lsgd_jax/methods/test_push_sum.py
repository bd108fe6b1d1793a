"""Push-sum: the mass that it conserves, and the weights with which it mixes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PUSH, PUSHED, UNEQUAL, close, make, mass, rule_of

import lsgd_jax as lj


@pytest.mark.parametrize("topology", [UNEQUAL, PUSHED], ids=["unequal", "weighted"])
def test_push_sum_conserves_mass(topology):
    run = make(lj.osgp(topology, staleness=3), 4)
    params = run.workers.put(run.start)
    state = run.init(params)
    s, w = mass(params, state)
    weights = []
    for batch in run.batches:
        step = 0.1 * (np.asarray(params["w"]) - np.asarray(batch["w"])).sum(axis=0)
        params, state = run.compiled(params, state, run.workers.put(batch))
        s_after, w_after = mass(params, state)
        close(s_after, s - step, rtol=1e-5, atol=1e-5)
        close(w_after, w)
        s = s_after
        weights.append(np.asarray(rule_of(state).weight))
    assert np.ptp(np.stack(weights), axis=1).max() > 0.1  # weights that are not 1


def test_push_sum_mixes_with_the_given_weights():
    run = make(lj.sgp(PUSHED), 4)
    s, w = np.asarray(run.start["w"], np.float64), np.ones(4)
    seen, state = run.still(5, run.start)
    for x in seen:
        s, w = np.tensordot(PUSH, s, 1), PUSH @ w
        close(x["w"], s / w[:, None, None])
    close(np.asarray(rule_of(state).weight), w)
    # A worker that is not finite keeps its weight; worker 1 does not get its 0.4.
    with_nan = jax.tree.map(lambda t: t.at[2].set(jnp.nan), run.start)
    seen, state = run.train([with_nan])
    x, y = run.start["w"], seen[0]["w"]
    close(np.asarray(rule_of(state).weight), np.array([0.7, 1.1, 1.3, 0.9]))
    close(y[1], (0.3 * x[0] + 0.8 * x[1]) / 1.1)
    close(y[2], (0.2 * x[0] + 0.1 * x[3]) / 0.3)
