"""Runs whose workers step at their own pace: the same folder, and the same ways to end."""

import dataclasses
import json
import signal

import memory_engine
import numpy as np
import pytest
import tiny

from train.metrics import log
from train.run.loop import train
from train.run.open import open_run
from train.task import methods


LSGD = methods.make("async-lsgd", local_period=2, global_period=4, loss_window=3)
CONFIG = dataclasses.replace(
    tiny.SMALL, method=LSGD, steps=12, log_every=4, test_every=4, checkpoint_every=6
)


def run_of(folder, **changes):
    config = dataclasses.replace(CONFIG, run_dir=str(folder), **changes)
    run = open_run(config)
    return run, train(run)


def test_a_run(tmp_path, monkeypatch, capsys):
    tiny.install(set=monkeypatch.setattr, figures=True)
    memory_engine.install(monkeypatch.setattr, step_seconds=[1.0, 1.0, 2.0, 1.0])
    run, result = run_of(tmp_path / "run")
    assert (result.step, result.stopped_by, result.saved) == (12, None, True)
    print(capsys.readouterr().out)
    print((tmp_path / "run" / "metrics.jsonl").read_text())
    print(sorted(p.name for p in (tmp_path / "run").iterdir()))
