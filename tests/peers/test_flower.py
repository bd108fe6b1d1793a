"""Flower's strategies: the aggregates that their tests expect.

adap/flower (Apache-2.0), commit fdef7afb1dca3030553be302366cfd285ed6632c,
framework/py/flwr/server/strategy/{krum,multikrum,fedmedian}_test.py and
framework/py/flwr/serverapp/strategy/{multikrum,fedmedian,fedtrimmedavg,fedavgm}_test.py.
Compared: the aggregates of Krum, median and trimmed mean, and the parameters of FedAvgM and
FedAdam, which are `diloco` with a server's optimizer as the outer one.

Flower's tests of FedAvgM have almost no momentum, and those of FedAdam have no numbers, so
four rounds of both classes (flwr 1.42.0) are compared, too. FedAdam corrects the bias of
round t as if it were t + 1, hence the schedule.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import aggregate, train

import lsgd_jax as lj


PERMUTED = [[1.0, 0.2, 0.5, 1.0], [0.2, 0.5, 1.0, 0.2], [0.5, 1.0, 0.2, 0.5]]
# (method, what the nodes send, what the server makes of it)
AGGREGATES = {
    "krum": (lj.robust.krum(faulty=1), [[0.2] * 4, [0.7] * 4, [1.0] * 4], [0.7] * 4),
    "median": (lj.robust.coordinate_median(), [[0.2] * 4, [1.0] * 4, [0.5] * 4], [0.5] * 4),
    "median, permuted": (lj.robust.coordinate_median(), PERMUTED, [0.5] * 4),
    "median, scalars": (lj.robust.coordinate_median(), [[1.0], [3.0], [2.0]], [2.0]),
    "trimmed mean": (lj.robust.trimmed_mean(cut=1), [[0.5] * 4, *PERMUTED], [0.5] * 4),
    "trimmed mean, scalars": (
        lj.robust.trimmed_mean(),
        [[0.5], [1.0], [2.0], [100.0]],
        [1.5],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGGREGATES)
def test_aggregates(name):
    tx, rows, expected = AGGREGATES[name]
    seen = aggregate(tx, np.float32(rows))
    np.testing.assert_array_equal(seen, np.tile(np.float32(expected), (len(rows), 1)))


def test_multi_krum_of_three_workers_is_the_median():
    """Flower averages the best two of three, 0.35. One in three may be any worker."""
    seen = aggregate(lj.robust.krum(faulty=1, keep=2), np.float32([[0.2], [0.5], [1.0]]))
    np.testing.assert_array_equal(seen, np.full((3, 1), np.float32(0.5)))


# Two nodes with 1 and 2 examples, which reply the same in every round.
REPLIES = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    [29, 23, 19, 17, 13, 11, 7, 5, 3, 2],
]
# After rounds 1 to 4, in which the nodes reply (1, 29, 7) and (3, 2, -7).
FEDAVGM = [
    [1.1666667, 5.5, -1.1666667],
    [2.8, 13.2, -2.8],
    [4.0366667, 19.03, -4.0366667],
    [4.298, 20.262, -4.298],
]
FEDADAM = [
    [0.07424598, 0.07424598, -0.07424598],
    [0.15982201, 0.15988482, -0.15982201],
    [0.25034546, 0.2506067, -0.25034546],
    [0.34349717, 0.3441743, -0.34349717],
]


def rounds(outer, replies, count):
    """The server's parameters after each round, [rounds, nodes, n]; they start at 0."""
    workers = lj.Workers(1, 2)
    method = lj.diloco(1, outer, weights=(1, 2))
    replies = np.array(replies, np.float32)
    move = lambda x, reply: reply - x
    return np.array(
        train(method, workers, 0 * replies, [replies] * count, gradient=move)[0]
    )


@pytest.mark.slow
def test_fedavgm_with_almost_no_momentum():
    seen = rounds(optax.sgd(1 + 1e-9, momentum=1e-9), REPLIES, 2)
    expected = (np.array(REPLIES[0]) + 2 * np.array(REPLIES[1])) / 3
    np.testing.assert_allclose(seen, np.broadcast_to(expected, (2, 2, 10)), rtol=1e-6)


def bias_of_the_next_round(k, b1=0.9, b2=0.99):
    """FedAdam's factor in round k + 1, over Adam's."""
    factor = lambda t: jnp.sqrt(1 - b2**t) / (1 - b1**t)
    return factor(k + 2.0) / factor(k + 1.0)


FEDADAM_OUTER = optax.chain(
    optax.scale_by_adam(0.9, 0.99, eps=0.0),
    optax.scale_by_schedule(bias_of_the_next_round),
    optax.scale(-0.1),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "outer, expected",
    [(optax.sgd(0.5, momentum=0.9), FEDAVGM), (FEDADAM_OUTER, FEDADAM)],
    ids=["FedAvgM", "FedAdam"],
)
def test_server_optimizers(outer, expected):
    seen = rounds(outer, [[1, 29, 7], [3, 2, -7]], 4)
    for node in range(2):
        np.testing.assert_allclose(seen[:, node], expected, rtol=2e-6)
