"""Runs whose workers are sharded over several devices."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from train.config import WorkersConfig
from train.run.loop import train
from train.run.open import open_run
from train.task import inside


pytestmark = pytest.mark.usefixtures("quick")

SMALL = dataclasses.replace(tiny.SMALL, steps=4, log_every=2, test_every=4)


@pytest.fixture(autouse=True)
def small_leaves_are_sharded(monkeypatch):
    monkeypatch.setattr(inside, "SMALLEST", 1)


def ran(folder, grid, steps=4, resume=False):
    """The run after its steps, and its parameters on the host."""
    workers = WorkersConfig(*grid)
    config = dataclasses.replace(
        SMALL, workers=workers, steps=steps, resume=resume, run_dir=str(folder)
    )
    run = open_run(config)
    start = run.experiment.workers.fetch(run.state.params)
    result = train(run)
    assert result.saved and result.step == steps
    return run, start, run.experiment.workers.fetch(run.state.params)


def check_equal(tree, other, **tolerances):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerances), tree, other)


@pytest.mark.slow
def test_a_sharded_run_equals_a_whole_one_and_resumes_on_other_devices(tmp_path):
    """2 x 2 workers of 2 devices each, resumed unsharded, then as 2 x 1 of 4 devices."""
    sharded, _, params = ran(tmp_path / "run", (2, 2, ("fsdp=2",)))
    kernels = [x for x in jax.tree.leaves(sharded.state) if x.shape == (4, 64, 10)]
    assert len(kernels) >= 2 and all(x.sharding.spec[1] == "fsdp" for x in kernels)
    _, _, expected = ran(tmp_path / "whole", (2, 2))
    check_equal(params, expected, rtol=1e-5, atol=1e-6)

    _, start, params = ran(tmp_path / "run", (2, 2), steps=6, resume=True)
    _, expected_start, expected = ran(tmp_path / "whole", (2, 2), steps=6, resume=True)
    check_equal(start, sharded.experiment.workers.fetch(sharded.state.params), rtol=0)
    check_equal(params, expected, rtol=1e-5, atol=1e-6)

    fewer, start, _ = ran(
        tmp_path / "run", (2, 1, ("fsdp=2", "model=2")), steps=8, resume=True
    )
    sources = fewer.resizing.sources
    check_equal(start, jax.tree.map(lambda x: x[sources], params), rtol=0)
    kernels = [x for x in jax.tree.leaves(fewer.state) if x.shape == (2, 64, 10)]
    assert all(x.sharding.spec[1] == ("fsdp", "model") for x in kernels)
