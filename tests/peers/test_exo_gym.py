"""DiLoCo of EXO Gym: the parameters that its released code computes.

exo-explore/gym (MIT, says its pyproject.toml), exogym/strategy/diloco.py of commit
9fa323c26364f4437ffd23517da5d65946003963, which has no test. SGD of rate 0.1, H = 3, the
default outer optimizer. Compared: the parameters after its three exchanges, the same on all
workers.

EXO Gym first exchanges after H + 1 steps, then every H. Its first two steps are one step
here, with the sum of their gradients. On a CPU its worker 0 shares memory with the anchor,
which then moves with that worker's steps. In our run worker 0 got a copy, as on a GPU.
"""

import numpy as np
import optax
import pytest
from peers.released import gradients, trained

import lsgd_jax as lj


# After its steps 4, 7 and 10.
EXCHANGED = [
    [0.9335, -2.0, 0.5665],
    [0.97165, -2.0665, 0.578225],
    [0.95786, -2.0616, 0.58834],
]


@pytest.mark.slow
def test_diloco():
    first, second, *rest = gradients(10)
    seen = trained(optax.chain(optax.sgd(0.1), lj.diloco(3)), [first + second, *rest])
    for after, expected in zip(seen[2::3], EXCHANGED, strict=True):
        np.testing.assert_allclose(after, np.tile(expected, (4, 1)), atol=2e-6)
