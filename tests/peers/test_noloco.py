"""NoLoCo: the parameters that its authors' released code computes.

gensyn-ai/noloco (MIT), commit a1b4a425bdc4050a356cf9f4bae7c383419703ab,
src/noloco/sparse_optimizer_c.py, which its experiments use and which has no test. Adam of
rate 0.1, 2 local steps, groups of 2, outer rate 0.7 (here β and γ), outer momentum 0.5 (α).
Compared: the parameters of 4 workers after its three exchanges. The pairs are those that it
drew.
"""

import numpy as np
import optax
from peers.released import gradients, trained

import lsgd_jax as lj


PAIRS = [[(3, 1), (2, 0)], [(3, 2), (1, 0)], [(0, 1), (2, 3)]]
# After its steps 2, 4 and 6.
EXCHANGED = [
    [
        [0.995069, -1.995031, 0.520423],
        [0.962938, -1.99797, 0.506685],
        [0.995069, -1.995031, 0.520423],
        [0.962938, -1.99797, 0.506685],
    ],
    [
        [0.920183, -1.937718, 0.504635],
        [0.894478, -1.940068, 0.493644],
        [0.994322, -2.054751, 0.581684],
        [0.968617, -2.057102, 0.570693],
    ],
    [
        [0.839747, -1.892181, 0.503039],
        [0.835249, -1.892592, 0.501116],
        [1.0121, -2.119429, 0.62617],
        [1.007602, -2.119841, 0.624247],
    ],
]


def test_noloco():
    both_ways = [[*pairs, *((j, i) for i, j in pairs)] for pairs in PAIRS]
    method = lj.contrib.noloco(2, 0.5, 0.7, 0.7, lj.topology.from_edges(both_ways))
    seen = trained(optax.chain(optax.adam(0.1), method), gradients(6))
    np.testing.assert_allclose(seen[1::2], EXCHANGED, atol=2e-6)
