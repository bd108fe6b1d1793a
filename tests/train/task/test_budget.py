"""--method budget-lsgd by one process: the synchronous method, run as any other one."""

import dataclasses

import numpy as np
import pytest
import tiny

from train.cluster.session import Session
from train.metrics import log
from train.run.loop import train
from train.run.open import open_run
from train.task import methods


OPTIONS = {"local_period": 2, "global_period": 4, "loss_window": 3}
BUDGET = dataclasses.replace(tiny.SMALL, method=methods.make("budget-lsgd", **OPTIONS))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    tiny.install(share=True, set=monkeypatch.setattr)


def run(config, folder, **changes):
    opened = open_run(dataclasses.replace(config, run_dir=str(folder), **changes))
    return opened, train(opened)


def test_one_process_trains_as_the_synchronous_method_does(tmp_path):
    same, lock_step = run(tiny.SMALL, tmp_path / "lsgd")
    budget, result = run(BUDGET, tmp_path / "budget")
    for name, expected in tiny.leaves(same.state.params).items():
        found = tiny.leaves(budget.state.params)[name]
        np.testing.assert_allclose(found, expected, 1e-6, 1e-6)
    assert result.step == lock_step.step == 12 and result.is_good
    events = log.read(result.folder)
    assert events["train"][-1]["taken"] == [12] * 4
    expected = log.read(lock_step.folder)
    for kind in ("train", "test"):
        steps = [event["step"] for event in events[kind]]
        assert steps == [event["step"] for event in expected[kind]]
        losses = [event.get("loss", event.get("center_loss")) for event in events[kind]]
        others = [event.get("loss", event.get("center_loss")) for event in expected[kind]]
        np.testing.assert_allclose(losses, others, 1e-5)
    assert events["leaders"] and len(events["leaders"]) == len(expected["leaders"])


def test_a_run_goes_on_to_the_bit(tmp_path):
    whole, _ = run(BUDGET, tmp_path / "whole")
    run(BUDGET, tmp_path / "parts", steps=7)  # 7: the last round is shorter
    parts, _ = run(BUDGET, tmp_path / "parts", resume=True)
    tiny.assert_equal_to_the_bit(parts.state, whole.state)


def test_workers_of_several_devices_are_refused(tmp_path):
    inside = dataclasses.replace(BUDGET.workers, inside=("fsdp=2",))
    with pytest.raises(ValueError, match="must not be sharded inside, got inside="):
        run(BUDGET, tmp_path / "run", workers=inside)
    assert not list(tmp_path.iterdir())


def test_a_process_counts_with_the_others_of_its_run():
    assert Session.single().counts() is None
