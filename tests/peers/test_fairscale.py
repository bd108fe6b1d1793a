"""SlowMo and SGP of fairscale: the parameters that its code computes.

facebookresearch/fairscale (BSD-3-Clause), commit 146f160241651e1211c4247979f159a4ef43b54a,
fairscale/experimental/nn/data_parallel/gossip: `perform_slowmo` of the wrapped model, and
`PushSum.mix`. Its own test, tests/experimental/nn/data_parallel/test_gossip.py, needs GPUs
and has no numbers: it compares with one process. SGD of rate 0.1. SlowMo stands over local
SGD of period 2, every 4 steps with momentum 0.5 and slow rate 0.75. SGP uses the directed
exponential graph, from starts that differ. Compared: the parameters of 4 workers after each
exchange.

The code of SGP's authors may not be used commercially (CC BY-NC 4.0), so nothing is taken
from it. fairscale's is the same method.
"""

import numpy as np
import optax
import pytest
from peers.released import START, gradients, trained

import lsgd_jax as lj


# After steps 2, 4, 6 and 8, the same on all workers.
SLOWMO = [
    [0.98125, -1.99375, 0.53125],
    [0.9625, -2.0, 0.5375],
    [0.9875, -2.01875, 0.54375],
    [0.971875, -2.0375, 0.55625],
]
# After steps 1 to 6.
SGP = [
    [[2.475, -5.0125, 1.25], [1.4125, -2.9375, 0.6875]]
    + [[2.475, -5.0125, 1.25], [3.5375, -7.0875, 1.8125]],
    [[2.45, -5.025, 1.25], [2.5125, -4.9625, 1.3125]] * 2,
    [[2.38125, -4.94375, 1.20625], [2.45625, -5.00625, 1.28125]]
    + [[2.51875, -5.08125, 1.34375], [2.44375, -5.01875, 1.26875]],
    [[2.4875, -4.9625, 1.3375], [2.4125, -5.0375, 1.2625]] * 2,
    [[2.55, -5.025, 1.2875], [2.4875, -5.0875, 1.3625]]
    + [[2.4125, -5.025, 1.2875], [2.475, -4.9625, 1.2125]],
    [[2.44375, -5.05, 1.275], [2.50625, -4.9875, 1.3375]] * 2,
]


@pytest.mark.slow
def test_slowmo():
    slowmo = lj.slowmo(4, alpha=0.75, beta=0.5, learning_rate=0.1)
    tx = optax.chain(optax.sgd(0.1), lj.exchange(lj.local_sgd(2), slowmo))
    for seen, expected in zip(trained(tx, gradients(8))[1::2], SLOWMO, strict=True):
        np.testing.assert_allclose(seen, np.tile(expected, (4, 1)), atol=2e-6)


def test_sgp():
    start = START * np.arange(1, 5, dtype=np.float32)[:, None]
    tx = optax.chain(optax.sgd(0.1), lj.sgp(lj.topology.exponential))
    np.testing.assert_allclose(trained(tx, gradients(6), start), SGP, atol=2e-6)


def test_hops_of_two_peers_are_not_theirs():
    """With 2 peers of 8 workers theirs are 1, 2, 3, 6; here they are powers of two."""
    graph = lj.topology.exponential(8, peers=2)
    hops = {(j - i) % 8 for turn in graph.rounds for sent in turn for i, j in sent}
    assert hops == {1, 2, 4}
