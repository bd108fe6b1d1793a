"""Batch statistics: kept, averaged at each communication, or reestimated before a test."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lsgd_jax as lj
from configs.digits import CONFIG
from train.config import WorkersConfig
from train.run.loop import Run
from train.task import batch_statistics as statistics
from train.task import methods


SMALL = dataclasses.replace(
    CONFIG,
    model="digits-bn",
    workers=WorkersConfig(nodes=2, locals=2),
    method=methods.make("lsgd", 0.1, 0.1, 2, 4),
    steps=8,
    batch_size=16,
    log_every=4,
    test_every=8,
    checkpoint_every=8,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of every policy."""
    finished = {}
    for policy in ("keep", "average", "reestimate"):
        folder = tmp_path_factory.mktemp(policy) / "run"
        run = Run(dataclasses.replace(SMALL, batch_statistics=policy, run_dir=str(folder)))
        finished[policy] = run, run.train()
    return finished


def test_the_statistics_of_one_batch_are_its_mean_and_variance():
    x = jnp.asarray(np.random.default_rng(0).normal(2, 3, size=(64, 5)), jnp.float32)
    model = nn.BatchNorm(use_running_average=False, momentum=0.99)
    variables = model.init(jax.random.key(0), x)
    params, stats = (
        {"params": variables["params"]},
        {"batch_stats": variables["batch_stats"]},
    )
    apply = lambda stats: model.apply(params | stats, x, mutable=["batch_stats"])
    got = statistics.of_batch(apply, stats)["batch_stats"]
    np.testing.assert_allclose(got["mean"], x.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(got["var"], x.var(axis=0), rtol=1e-4)


def test_statistics_never_influence_the_parameters(runs):
    """In training a batch is normalized by itself: all policies end in the same place."""
    first, *others = (jax.tree.leaves(run.state.params) for run, _ in runs.values())
    for other in others:
        for a, b in zip(first, other):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_kept_statistics_differ_and_averaged_ones_are_equal_after_an_exchange(runs):
    apart = lambda policy: float(lj.consensus_distance(runs[policy][0].state.stats))
    assert apart("keep") > 1e-3 and apart("reestimate") == apart("keep")
    assert apart("average") < 1e-6  # the last step was one with a pull


def test_averages_are_those_of_what_was_kept(runs):
    """Averaging commutes with the running mean, which is linear; all inputs were equal."""
    kept, averaged = runs["keep"][0].state.stats, runs["average"][0].state.stats
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(averaged)):
        np.testing.assert_allclose(a.mean(axis=0), b[0], rtol=1e-4, atol=1e-5)


def test_reestimating_uses_the_tested_parameters_and_leaves_the_workers_alone(runs):
    run, _ = runs["reestimate"]
    experiment = run.experiment
    before = [np.asarray(x) for x in jax.tree.leaves(run.state.stats)]
    center = lj.consensus(run.state.params)
    got = experiment._stats_from_data(center, lj.consensus(run.state.stats))
    experiment.test_center(run.state)
    for a, b in zip(before, jax.tree.leaves(run.state.stats)):
        np.testing.assert_array_equal(a, b)

    images = experiment.data.value[0]
    means = []
    for step in range(8):
        for rows in np.asarray(experiment.batch(step)):
            x = experiment._transforms.test(images[rows])  # digits: as in training
            y = nn.Conv(32, (3, 3), use_bias=False).apply({"params": center["Conv_0"]}, x)
            means.append(np.asarray(y).mean(axis=(0, 1, 2)))
    first = got["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(first, np.mean(means, axis=0), rtol=1e-3, atol=1e-5)


def test_every_policy_resumes_to_the_same_test(runs):
    for run, result in runs.values():
        again = Run(
            dataclasses.replace(run.config, run_dir=str(result.folder), resume=True)
        )
        assert again.train().center_error == result.center_error


def test_how_often_statistics_are_averaged():
    workers = lj.Workers(1, 2)
    x = workers.put(jnp.ones((2, 3)))
    state = lambda method: workers.map(method.build(2).init)(x)
    stats = {"batch_stats": {"mean": jnp.zeros(3)}}
    build = lambda policy, method: statistics.averaging(policy, stats, state(method))
    assert (
        build("keep", methods.make("lsgd")) is None
        and build("reestimate", methods.make("lsgd")) is None
    )
    assert statistics.averaging("average", {}, state(methods.make("lsgd"))) is None
    tx = build("average", methods.make("local-sgd", period=5))
    assert lj.diagnostics(workers.map(tx.init)(x))[0].period == 5
