"""Every method trains digits end to end for a few steps, on four workers."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import Tiny

from configs.digits import CONFIG
from train.config import OptimizerConfig, WorkersConfig
from train.metrics import log as records
from train.run.loop import Run
from train.task import methods
from train.task.methods import METHODS
from train.task.models import MODELS


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains(name, tmp_path, monkeypatch):
    if name != "parle":  # in so few steps its center learns less than one layer needs
        monkeypatch.setitem(MODELS, "digits-cnn", Tiny)
    small = {"period": 2, "switch_step": 4}
    options = {k: v for k, v in small.items() if k in METHODS[name].__dataclass_fields__}
    config = dataclasses.replace(
        CONFIG,
        workers=WorkersConfig(nodes=2, locals=2),
        method=methods.make("lsgd", 0.1, 0.1, 2, 4)
        if name == "lsgd"
        else METHODS[name](**options),
        steps=8,
        batch_size=16,
        log_every=4,
        test_every=8,
        checkpoint_every=8,
        run_dir=str(tmp_path / "run"),
    )
    run = Run(config)
    result = run.train()
    assert result.saved and result.stopped_by is None and 0 <= result.center_error < 90
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run.state.params))
    events = records.read(result.folder)
    first, last = events["train"]
    assert last["loss"] < first["loss"]
    numbers = sum(x[0].size for x in jax.tree.leaves(run.state.params))
    sent = last.get("bytes_sent", 0)
    assert (
        sent == 0 if name == "independent" else 4 * numbers * 4 <= sent <= 4 * numbers * 17
    )
    # All took the same gradient, or exchanged everything at the last step.
    whole = ("downpour", "local-sgd", "post-local-sgd", "slowmo", "diloco")
    together = config.method.first or name in whole
    assert (last["consensus_distance"] < 1e-6) == together


def test_lars_behind_all_reduce(tmp_path):
    optimizer = OptimizerConfig(name="lars", learning_rate=5.0, momentum=0.9)
    config = dataclasses.replace(
        CONFIG,
        workers=WorkersConfig(nodes=1, locals=2),
        optimizer=optimizer,
        method=methods.make("allreduce"),
        steps=8,
        batch_size=16,
        log_every=4,
        run_dir=str(tmp_path / "run"),
    )
    events = records.read(Run(config).train().folder)
    assert events["train"][-1]["loss"] < events["train"][0]["loss"]
