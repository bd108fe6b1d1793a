"""Parle against its two special cases, and its schedules."""

import numpy as np
import pytest
from harness import close, make

import lsgd_jax as lj


def test_parle_without_the_center_is_entropy_sgd():
    """The workers are then independent."""
    lr, gamma, L, decay = 0.1, 5.0, 3, 0.75
    tx = lj.parle(lr, L, anchor_pull=1 / gamma, center_pull=0, decay=decay)
    run = make(tx, 3)
    y = x = z = run.start["w"]
    for t, (target, seen) in enumerate(zip(run.batches, run.train()[0]), 1):
        y = y - lr * ((y - target["w"]) + (y - x) / gamma)
        z = decay * z + (1 - decay) * y
        if t % L == 0:
            x = x - lr * (x - z)
            y = z = x
        close(seen["w"], np.asarray(y))


def test_parle_without_the_inner_loop_is_elastic_sgd():
    lr, rho, decay = 0.1, 0.5, 0.75
    tx = lj.parle(lr, 1, anchor_pull=0, center_pull=1 / rho, decay=decay)
    run = make(tx, 3)
    x = np.asarray(run.start["w"])
    center = x.mean(axis=0)
    seen, state = run.train()
    for target, after in zip(run.batches, seen):
        step = -lr * (1 - decay) * lr * (x - np.asarray(target["w"]))
        x = x + step - lr / rho * (x - center)
        center = x.mean(axis=0)
        close(after["w"], x)
    close(np.asarray(lj.center(seen[-1], state)["w"]), center)


@pytest.mark.slow  # `tests/train/config/test_methods.py` follows one
def test_parle_takes_schedules():
    pulls = dict(
        anchor_pull=lj.scoping(0.01, 2, period=2),
        center_pull=lj.scoping(1.0, 2, period=2, largest=10.0),
    )
    growing = make(lj.parle(lambda t: 0.1, 2, **pulls), 3).train()[0]
    fixed = make(lj.parle(0.1, 2, anchor_pull=0.01), 3).train()[0]
    close(growing[0], fixed[0])  # the first loop runs at the first values
    assert np.abs(growing[-1]["w"] - fixed[-1]["w"]).max() > 1e-4
