"""D-PSGD and AD-PSGD on small graphs, and the graphs that methods refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import PUSHED, UNEQUAL, aggregate, close, make

import lsgd_jax as lj


graph = lj.topology


def test_dpsgd_on_a_star_with_metropolis_weights():
    run = make(lj.dpsgd(graph.metropolis([(0, 1), (0, 2), (0, 3)])), 4)
    x = run.start["w"]
    seen, _ = run.still(1, run.start)
    rows = [x.mean(axis=0), *(0.75 * x[i] + 0.25 * x[0] for i in (1, 2, 3))]
    close(seen[0]["w"], jnp.stack(rows))
    with_nan = jax.tree.map(lambda t: t.at[1].set(jnp.nan), run.start)
    seen, _ = run.train([with_nan])
    rows[:2] = [(2 * x[0] + x[2] + x[3]) / 4, x[0]]
    close(seen[0]["w"], jnp.stack(rows))


def test_adpsgd_averages_pairs_and_the_odd_worker_waits():
    run = make(lj.adpsgd(graph.bipartite_exponential(3)), 3)
    x, target = run.start["w"], run.batches[0]["w"]
    seen, _ = run.train(run.batches[:1])
    pair = (x[0] + x[1]) / 2
    close(seen[0]["w"], np.asarray(jnp.stack([pair, pair, x[2]]) - 0.1 * (x - target)))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: lj.dpsgd(UNEQUAL), "`topology` must be balanced"),
        (lambda: lj.dpsgd(PUSHED), "must be doubly stochastic"),
        (
            lambda: lj.pairwise(
                topology=graph.from_edges([[(0, 1)]], weights=[[[0.9, 0], [0.1, 1]]])
            ),
            "`topology` must have no `weights`",
        ),
        (lambda: lj.adpsgd(graph.ring(4)), "`topology` must pair the workers"),
        (lambda: lj.pairwise(topology=graph.ring(4)), "`topology` must have one peer"),
        (lambda: lj.contrib.gosgd(graph.complete(4)), "`topology` must have one peer"),
    ],
)
def test_refuses_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (lj.sgp(graph.ring(3)), "a graph of 4 workers"),
        (lj.pairwise(topology=graph.exponential(8)), "a graph of 4 workers"),
        (lj.adpsgd(lambda W: UNEQUAL), "balanced|pair"),
        (lj.pairwise("loss"), "loss=loss"),
    ],
)
def test_refuses_while_tracing(tx, message):
    with pytest.raises(ValueError, match=message):
        aggregate(tx, jnp.ones((4, 2)))
