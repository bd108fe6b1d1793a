"""Every worker's optimizer as configured, against hand-computed steps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import lsgd_jax as lj
from configs.digits import CONFIG
from train.config import OptimizerConfig, WorkersConfig
from train.task import methods
from train.task.experiment import make_optimizer


def trained(method, optimizer, steps):
    """The parameter of one worker after each step with a gradient of 1, from 0."""
    workers = WorkersConfig(nodes=1, locals=1)
    config = dataclasses.replace(
        CONFIG, workers=workers, method=method, optimizer=optimizer
    )
    tx, workers = make_optimizer(config), lj.Workers(1, 1)

    def step(x, state):
        updates, state = tx.update(jnp.ones([]), state, x, value=jnp.ones([]))
        return x + updates, state

    x = workers.put(jnp.zeros(1))
    state, seen, step = workers.map(tx.init)(x), [], workers.map(step)
    for _ in range(steps):
        x, state = step(x, state)
        seen.append(float(x[0]))
    return seen


def test_the_learning_rate_drops_after_the_steps_named():
    optimizer = OptimizerConfig(learning_rate=1.0, drop_at=(2, 3), drop_factor=0.5)
    expected = np.cumsum([-1.0, -1.0, -0.5, -0.25])
    np.testing.assert_allclose(
        trained(methods.make("independent"), optimizer, 4), expected, rtol=1e-6
    )


def test_lars_drops_too():
    optimizer = OptimizerConfig(name="lars", learning_rate=1.0, drop_at=(1,))
    # At zero LARS has no trust ratio; behind it, a step is 0.001 of the weight.
    expected = [-1.0, -1.0 - 0.1 * 0.001]
    np.testing.assert_allclose(
        trained(methods.make("independent"), optimizer, 2), expected, rtol=1e-6
    )


def test_slow_momentum_sees_the_rate_of_its_step():
    optimizer = OptimizerConfig(learning_rate=1.0, drop_at=(1,))
    # m = 1, then 0.5 m + 0.1 / 0.1 = 1.5; the second way is 0.1 m.
    expected = [-1.0, -1.15]
    seen = trained(methods.make("slowmo", period=1, alpha=1.0, beta=0.5), optimizer, 2)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


@pytest.mark.parametrize("drops", [(0,), (5, 5), (7, 3), (-1,)])
def test_drops_must_ascend(drops):
    with pytest.raises(ValueError, match="`optimizer.drop_at` must be positive and ascend"):
        dataclasses.replace(CONFIG, optimizer=OptimizerConfig(drop_at=drops))


def test_a_drop_must_leave_something():
    with pytest.raises(ValueError, match="`optimizer.drop_factor` must be positive"):
        dataclasses.replace(CONFIG, optimizer=OptimizerConfig(drop_factor=0.0))
