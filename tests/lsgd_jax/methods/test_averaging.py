"""Means of parameters: SlowMo's rule, all-reduce before local SGD, and bfloat16."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import SGD, Run, everywhere, make, mean

import lsgd_jax as lj


graph = lj.topology


def test_post_local_sgd_switches():
    tx = optax.chain(lj.allreduce(until=3), SGD, lj.local_sgd(3))
    run = Run(tx, 1, 4, 1)
    start = everywhere(mean(run.start), 4)
    seen, state = run.train(start=start)
    assert state[0].restored.tolist() == [0] * 4
    spread = [float(np.ptp(x["w"], axis=0).max()) for x in seen]
    together = [s < 1e-6 for s in spread]
    assert together == [True, True, True, False, False, True, False, False]


@pytest.mark.parametrize(
    "method",
    [
        lambda: lj.local_sgd(1),
        pytest.param(lambda: lj.sgp(graph.exponential(8)), marks=pytest.mark.slow),
    ],
    ids=["local_sgd", "sgp"],
)
def test_means_of_bfloat16_are_computed_in_float32(method):
    run = make(method(), 8, dtype=jnp.bfloat16)
    seen, _ = run.still(3, run.start)
    exact = mean(jax.tree.map(lambda x: np.asarray(x, np.float32), run.start))
    got = jax.tree.map(lambda x: x.astype(np.float32), seen[-1])
    assert seen[-1]["w"].dtype == jnp.bfloat16
    # Three roundings to 8 bits at most; a sum in bfloat16 would be off by more.
    chex.assert_trees_all_close(got, everywhere(exact, 8), rtol=0.02, atol=0.01)
