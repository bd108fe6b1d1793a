"""Asynchronous workers and workers in lock step train alike."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import tiny

import lsgd_jax as lj
from train.config import methods
from train.task import asynchronous, inside
from train.task.asynchronous import AsynchronousExperiment
from train.task.experiment import Experiment


LSGD = dict(local_period=2, global_period=4, loss_window=3)


def stack(*rows):
    return np.stack(rows)


@pytest.mark.parametrize(
    "delay, shard, axes",
    [
        (1, True, {"fsdp": 2, "model": 2}),
        pytest.param(0, False, {}, marks=pytest.mark.slow),
    ],
)
def test_workers_at_equal_speed_equal_workers_in_lock_step(delay, shard, axes, monkeypatch):
    """Also workers of several devices, which are sharded in the end."""
    tiny.install(set=monkeypatch.setattr)
    monkeypatch.setattr(inside, "SMALLEST", 1)
    rate = dict(schedule="cosine", warmup_steps=3)
    config = dataclasses.replace(
        tiny.SMALL,
        data=dataclasses.replace(tiny.SMALL.data, shard=shard),
        model="digits-bn",
        batch_statistics="keep",
        method=methods.make("overlapped-lsgd", **LSGD, delay=delay),
        optimizer=dataclasses.replace(tiny.SMALL.optimizer, **rate),
    )
    in_lock_step = methods.make("lsgd", **LSGD, delay=delay)
    experiment = Experiment(dataclasses.replace(config, method=in_lock_step))
    state, losses = experiment.init(), []
    for t in range(6):
        state, loss = experiment.step(state, experiment.data, experiment.batch(t))
        losses.append(loss)

    seen = [[] for _ in range(4)]
    workers = lj.asynchronous.simulator.run(
        asynchronous.training(config, mesh=inside.mesh(axes)),
        config.method.asynchronous(),
        nodes=2,
        locals=2,
        steps=6,
        observe=lambda worker: seen[worker.index].append(worker.loss),
    ).workers
    np.testing.assert_allclose(np.transpose(seen), losses, rtol=1e-5)
    count = math.prod(axes.values())
    for worker in workers:
        (kernel,) = (x for x in jax.tree.leaves(worker.params) if x.shape == (64, 10))
        shards = [shard.data.shape for shard in kernel.addressable_shards]
        assert shards == [(64 // count, 10)] * count
    put = lambda trees: experiment.workers.put(jax.tree.map(stack, *trees))
    mine = state._replace(
        params=put([worker.params for worker in workers]),
        stats=put([worker.own.stats for worker in workers]),
    )
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, (mine.params, mine.stats), (state.params, state.stats))
    tested, expected = (experiment.test_center(x) for x in (mine, state))
    assert tested["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert tested["error"] == expected["error"]


def collected(policy):
    """Returns the experiment and the stacked state of workers with different statistics."""
    method = methods.make("async-lsgd", **LSGD)
    config = dataclasses.replace(
        tiny.SMALL, model="digits-bn", batch_statistics=policy, method=method
    )
    experiment = AsynchronousExperiment(config)
    first = experiment.apart(experiment.init())
    shifted = lambda i, own: own._replace(stats=jax.tree.map(lambda r: r + i, own.stats))
    states = [{**state, "own": shifted(i, state["own"])} for i, state in enumerate(first)]
    return experiment, experiment.stacked(states, step=3, sent=[0.0] * len(states))


def test_statistics_are_averaged_where_all_states_are_at_hand(monkeypatch):
    """The tested model is the same as if workers kept theirs; a checkpoint has the mean."""
    tiny.install(set=monkeypatch.setattr)
    _, kept = collected("keep")
    experiment, state = collected("average")
    assert float(lj.consensus_distance(kept.stats)) > 0.1
    assert float(lj.consensus_distance(state.stats)) == 0
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)
    jax.tree.map(close, *map(lj.consensus, (kept.stats, state.stats)))
    jax.tree.map(np.testing.assert_array_equal, kept.params, state.params)
    resumed = experiment.apart(state)
    mean = jax.device_get(lj.consensus(kept.stats))
    assert jax.tree.leaves(mean)
    for worker in resumed:
        jax.tree.map(close, worker["own"].stats, mean)
