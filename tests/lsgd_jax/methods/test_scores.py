"""Scores by which workers are elected, and the mean of the best."""

import numpy as np
from harness import train

import lsgd_jax as lj


X = np.float32([0, 1, 5, 2])


def mean(keep, losses, x=X):
    """The workers' x after a whole pull to the mean of those of the lowest losses."""
    rule = lj.rules.leader(("node", "local"), keep=keep)
    workers = lj.Workers(1, 4)
    seen, _ = train(
        lj.exchange(lj.Pull(rule, 1.0)), workers, x, [np.zeros(4, np.float32)], [losses]
    )
    return seen[-1].tolist()


def test_the_mean_of_the_best():
    assert mean(2, [3, 1, 4, 2]) == [1.5] * 4  # workers 1 and 3
    assert mean(1, [1, 1, 4, 2]) == [0] * 4  # ties go to the lowest index
    assert mean(2, [np.nan, 1, np.nan, np.nan]) == [1] * 4  # all that are finite
    # A huge leader is followed, and enters no mean.
    x = np.float32([0, 3e38, 5, 2])
    assert mean(1, [3, 1, 4, 2], x) == [x[1]] * 4
    assert mean(2, [3, 1, 4, 2], x)[2:] == [1, 1]  # of workers 0 and 3
