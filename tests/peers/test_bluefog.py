"""BlueFog's neighbor averaging: the values that its tests expect of 4 and 8 workers.

Bluefog-Lib/bluefog (Apache-2.0), commit 9ee376a7f7399f18d864f75b399dcfa6962fa4fb,
test/torch_ops_test.py, test_neighbor_allreduce_avg (exponential graph, all hops at once),
_avg_biring_topo, _avg_ring_topo (either direction) and _weighted_avg (star). Each worker
holds its rank. Compared: the mean of every worker, by the formula of each test.
"""

import numpy as np
import pytest
from harness import exchanged

import lsgd_jax as lj


def ring(W, hop):
    return lj.topology.from_edges([[(i, (i + hop) % W) for i in range(W)]])


def hops(W):
    return W.bit_length() - 1


GRAPHS = {
    "exponential": (
        lambda W: lj.topology.exponential(W, peers=hops(W)),
        lambda i, W: (i + sum((i - 2**k) % W for k in range(hops(W)))) / (hops(W) + 1),
    ),
    "both ways": (
        lj.topology.ring,
        lambda i, W: (i + (i + 1) % W + (i - 1) % W) / 3,
    ),
    "one way": (lambda W: ring(W, -1), lambda i, W: (i + (i + 1) % W) / 2),
    "the other way": (lambda W: ring(W, 1), lambda i, W: (i + (i - 1) % W) / 2),
    "star": (
        lambda W: lj.topology.metropolis([(0, i) for i in range(1, W)]),
        lambda i, W: i * (1 - 1 / W) if i else (W - 1) / 2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("W", [4, 8])
def test_neighbor_averaging(W):
    """All graphs in one exchange, each on a leaf of its own."""
    pull = lambda name: lj.Pull(lj.rules.neighbors(GRAPHS[name][0](W)), 1.0, part=[name])
    method = lj.exchange(*map(pull, GRAPHS))
    workers = lj.Workers(1, W)
    ranks = {name: np.arange(W, dtype=np.float32) for name in GRAPHS}
    seen, _ = exchanged(method, workers, ranks)
    for name, (_, expected) in GRAPHS.items():
        want = [expected(i, W) for i in range(W)]
        np.testing.assert_allclose(seen[name], want, rtol=1e-6, err_msg=name)
