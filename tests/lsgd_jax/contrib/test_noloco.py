"""NoLoCo: the pull that keeps slow weights together."""

import numpy as np
from harness import (
    train,
)

import lsgd_jax as lj


def test_noloco_keeps_the_slow_weights_together_if_gamma_pulls():
    """With another gradient for each worker; γ = 0 averages what is new, and no more."""

    def spread(gamma):
        graph = lj.topology.matchings(4, rounds=6, seed=1)
        tx = lj.contrib.noloco(1, gamma=gamma, topology=graph)
        u = np.random.default_rng(0).normal(size=(60, 4, 5)).astype(np.float32)
        seen, _ = train(tx, lj.Workers(1, 4), 0 * u[0], u)
        return float(lj.consensus_distance(seen[-1]))

    assert spread(0.7) < 0.4 * spread(0.0)
