"""The run in which the released code of some peers gave the numbers of their tests.

Four processes on a CPU, with torch 2.14.1 and gloo. Each has three parameters, and its
gradients are given, so that no model or data is needed.
"""

import numpy as np
from harness import train

import lsgd_jax as lj


START = np.array([1.0, -2.0, 0.5], np.float32)


def gradients(steps):
    """The gradients of steps t = 1, 2, …: [steps, 4, 3]."""
    t, i, k = np.meshgrid(np.arange(1, steps + 1), range(4), range(3), indexing="ij")
    return ((7 * t + 3 * i + 5 * k) % 11 - 5).astype(np.float32) / 4


def trained(tx, grads, start=None):
    """The parameters after every step, [steps, 4, 3]."""
    workers = lj.Workers(1, 4)
    start = np.tile(START, (4, 1)) if start is None else start
    return np.array(train(tx, workers, start, list(grads))[0])
