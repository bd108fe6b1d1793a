"""Streaming DiLoCo of torchft: the parameters that its regression test expects.

pytorch/torchft (BSD-3-Clause), commit 73dafea422116b2a713542719c8454efe5444c6c,
torchft/diloco_regression_test.py, test_diloco_mocked_updates and its six fixtures
test_fixtures/*.test_diloco_mocked_updates_{0..5}.json. Two replicas have two weights, which
start at 1 and are a fragment each. Gradients are 2, the inner rate is 1, the outer rate 2,
the period 6. Compared: each weight before every step, and the anchors, where a fixture has
them.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import lsgd_jax as lj


# (delay, mixing): the two weights before steps 1 to 16, the same on both replicas.
WEIGHTS = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5]
        + [-40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ),
    (0, 1.0): (list(range(1, -30, -2)), list(range(1, -30, -2))),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5]
        + [-35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ),
    (1, 1.0): (list(range(1, -30, -2)), list(range(1, -30, -2))),
}
# The anchors of both fragments before steps 1, 4, 7, 10 and 13.
ANCHORS = {
    (0, 0.0): ([1, -11, -11, -35, -35], [1, 1, -23, -23, -47]),
    (0, 0.5): ([1, -11, -11, -29, -29], [1, 1, -23, -23, -35]),
    (0, 1.0): ([1, -11, -11, -23, -23], [1, 1, -23, -23, -23]),
    (1, 0.0): ([1, -7, -7, -27, -27], [1, 1, -19, -19, -39]),
    (1, 0.5): ([1, -7, -7, -25, -25], [1, 1, -19, -19, -31]),
    (1, 1.0): ([1, -7, -7, -23, -23], [1, 1, -19, -19, -23]),
}


def anchors_of(state):
    """The anchors of the fragments, each of which has one weight."""
    is_rule = lambda node: isinstance(node, lj.AnchorState)
    rules = filter(is_rule, jax.tree.leaves(state, is_leaf=is_rule))
    return [float(x) for rule in rules for x in jax.tree.leaves(rule.anchor)]


# By default at once, and in flight.
@pytest.mark.slow
@pytest.mark.parametrize("delay, mixing", WEIGHTS)
def test_streaming_diloco(delay, mixing):
    method = lj.diloco(6, optax.sgd(2.0), mixing, fragments=2, delay=delay)
    tx = optax.chain(optax.sgd(1.0), method)
    workers = lj.Workers(1, 2)
    x = workers.replicate([jnp.float32(1), jnp.float32(1)])
    state = workers.map(tx.init)(x)

    @workers.map
    def step(x, state):
        u, state = tx.update([jnp.float32(2)] * 2, state, x)
        return lj.apply_updates(x, u), state

    weights, anchors = [x], [anchors_of(state)]
    for _ in range(15):
        x, state = step(x, state)
        weights.append(x)
        anchors.append(anchors_of(state))
    for replica in range(2):
        seen = [[float(x[k][replica]) for x in weights] for k in range(2)]
        assert tuple(seen) == WEIGHTS[delay, mixing]
    assert tuple(map(list, zip(*anchors[:13:3]))) == ANCHORS[delay, mixing]
