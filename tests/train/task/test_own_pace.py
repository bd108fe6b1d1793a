"""Workers at their own pace train what workers in lock step do, from the same parts."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

import lsgd_jax as lj
from lsgd_jax.asynchronous import memory
from train.task import own_pace
from train.task.experiment import Experiment


LSGD = dict(local_period=2, global_period=4, loss_window=3)


@pytest.fixture
def quick(monkeypatch):
    tiny.install(set=monkeypatch.setattr)


def trained(config, steps):
    """The parameters [W, ...] of workers in lock step, their losses, the experiment."""
    experiment = Experiment(config)
    state, losses = experiment.init(), []
    for t in range(steps):
        state, loss = experiment.step(state, experiment.data, experiment.batch(t))
        losses.append(np.asarray(loss))
    return state, losses, experiment


@pytest.mark.parametrize("shard", [False, True])
def test_in_lock_step_they_are_the_synchronous_trainers(quick, shard):
    data = dataclasses.replace(tiny.SMALL.data, shard=shard)
    config = dataclasses.replace(
        tiny.SMALL,
        data=data,
        model="digits-bn",
        optimizer=dataclasses.replace(
            tiny.SMALL.optimizer, schedule="cosine", warmup_steps=3
        ),
    )
    state, losses, experiment = trained(config, 8)
    seen = [[] for _ in range(4)]
    workers = memory.run(
        own_pace.training(config),
        lj.asynchronous.Pulls(lj.lsgd(**LSGD)),
        nodes=2,
        locals=2,
        steps=8,
        observe=lambda worker: seen[worker.index].append(worker.loss),
    )
    np.testing.assert_allclose(np.transpose(seen), losses, rtol=1e-5)
    stack = lambda trees: jax.tree.map(lambda *x: np.stack(x), *trees)
    params = [worker.params for worker in workers]
    stats = [worker.own.stats for worker in workers]
    for mine, theirs in ((params, state.params), (stats, state.stats)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            stack(mine),
            jax.tree.map(np.asarray, theirs),
        )
    tested = own_pace.test_consensus(experiment, params)
    expected = experiment.test_center(state)
    assert tested["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert tested["error"] == expected["error"]
