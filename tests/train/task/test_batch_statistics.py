"""Batch statistics: kept, averaged at each communication, or reestimated before a test."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from toys import slow

import lsgd_jax as lj
from train.config import methods
from train.task import batch_statistics, models
from train.task.experiment import Experiment


class Normed(nn.Module):
    """Batch normalization after a layer, so that its statistics depend on parameters."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8)(x.reshape(x.shape[0], -1))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(self.num_classes)(x)


@pytest.fixture(scope="module")
def installed():
    with pytest.MonkeyPatch.context() as patch:
        tiny.install(set=patch.setattr)
        patch.setitem(models.MODELS, "digits-bn", Normed)
        yield


@pytest.fixture(scope="module")
def trained(installed):
    """An experiment with each policy, and its state after 8 steps."""
    found = {}
    for policy in ("average", "reestimate"):  # in training 'keep' equals 'reestimate'
        config = dataclasses.replace(tiny.SMALL, model="digits-bn", batch_statistics=policy)
        experiment = Experiment(config)
        state = experiment.init()
        for t in range(8):
            state, _ = experiment.step(state, experiment.data, experiment.batch(t))
        found[policy] = experiment, state
    return found


@pytest.mark.slow
def test_the_statistics_of_a_batch_are_its_mean_and_variance():
    x = jnp.asarray(np.random.default_rng(0).normal(2, 3, size=(64, 5)), jnp.float32)
    model = nn.BatchNorm(use_running_average=False, momentum=0.99)
    variables = model.init(jax.random.key(0), x)
    apply = lambda stats: model.apply(variables | stats, x, mutable=["batch_stats"])
    stats = {"batch_stats": variables["batch_stats"]}
    got = batch_statistics.of_batch(apply, stats)["batch_stats"]
    np.testing.assert_allclose(got["mean"], x.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(got["var"], x.var(axis=0), rtol=1e-4)


def test_statistics_never_influence_the_parameters(trained):
    """Training normalizes a batch by itself, so that all policies give equal parameters."""
    averaged, reestimated = (state.params for _, state in trained.values())
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, averaged, reestimated)


def test_averaged_statistics_are_the_mean_of_kept_ones(trained):
    """Averaging commutes with the running mean, which is linear, for equal inputs."""
    kept, averaged = (trained[x][1].stats for x in ("reestimate", "average"))
    assert float(lj.consensus_distance(kept)) > 1e-3
    assert float(lj.consensus_distance(averaged)) < 1e-6  # the last step had a pull
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(averaged)):
        np.testing.assert_allclose(a.mean(axis=0), b[0], rtol=1e-4, atol=1e-5)


def test_reestimation_uses_the_tested_parameters_and_changes_no_worker(trained):
    experiment, state = trained["reestimate"]
    before = [np.asarray(x) for x in jax.tree.leaves(state.stats)]
    center = lj.consensus(state.params)
    got = experiment.reestimated(center, lj.consensus(state.stats))
    experiment.test_center(state)
    for a, b in zip(before, jax.tree.leaves(state.stats)):
        np.testing.assert_array_equal(a, b)

    images = experiment.data.value[0]
    means = []
    for step in range(8):
        for rows in np.asarray(experiment.batch(step)):
            x = experiment.forward.transforms.test(images[rows])  # digits: as in training
            y = nn.Dense(8).apply({"params": center["Dense_0"]}, x.reshape(len(rows), -1))
            means.append(np.asarray(y).mean(axis=0))
    first = got["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(first, np.mean(means, axis=0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "method, due",
    [
        (methods.make("lsgd", local_period=2, global_period=3), {2, 3, 4, 6}),
        slow(methods.make("post-local-sgd", switch_step=2, period=4), {1, 2, 4}),
        (methods.make("independent"), set()),
    ],
    ids=["lsgd", "post-local-sgd", "independent"],
)
def test_statistics_are_averaged_whenever_the_method_communicates(method, due):
    """All levels count, and their periods need not divide each other."""
    tx, workers = method.around(optax.sgd(0.1)), lj.Workers(1, 2)

    def step(x, stats, state):
        updates, after = tx.update(x, state, x, value=x.sum())
        stats = batch_statistics.averaged(stats + x, state, after)
        return lj.apply_updates(x, updates), stats, after

    x = workers.put(jnp.array([[1.0, 1.0], [5.0, 5.0]]))
    apart = workers.put(jnp.array([[1.0, 0.0], [2.0, 9.0]]))
    step, state = workers.map(step), workers.map(tx.init)(x)
    for t in range(1, 7):
        x, stats, state = step(x, apart, state)
        assert (float(lj.consensus_distance(stats)) < 1e-6) == (t in due), t
