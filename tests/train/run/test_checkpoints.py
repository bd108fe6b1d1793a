"""Checkpoints of a few arrays."""

import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.cluster.session import Session
from train.run import checkpoints as module
from train.run.checkpoints import Checkpoints
from train.run.reading import latest_notes, notes_of


def state(step):
    key = jax.random.split(jax.random.key(step), 2)
    return {"x": step + jnp.arange(6.0).reshape(2, 3), "host": np.full(3, step), "key": key}


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def opened(tmp_path, warnings):
    """Opens the checkpoints in a folder."""

    def opened(keep=2):
        folder = tmp_path / "checkpoints"
        return Checkpoints(folder, keep, warnings.append, Session.single())

    return opened


def save(checkpoints, *steps):
    for step in steps:
        assert checkpoints.save(step, state(step), {"seconds": step / 2})
    assert checkpoints.close()


def assert_restored(checkpoint, step):
    assert checkpoint.step == step and checkpoint.notes == {"seconds": step / 2}
    expected, restored = state(step), checkpoint.state
    np.testing.assert_array_equal(restored["x"], expected["x"])
    assert isinstance(restored["x"], jax.Array)
    assert isinstance(restored["host"], np.ndarray) and (restored["host"] == step).all()
    assert (
        jax.random.key_data(restored["key"]) == jax.random.key_data(expected["key"])
    ).all()


def truncate(folder, step):
    """Cuts off what the arrays of a checkpoint hold."""
    for path in (folder / str(step) / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:10])


def test_the_latest_ones_are_kept_and_restored(opened, tmp_path, warnings):
    checkpoints = opened()
    assert checkpoints.restore_latest(lambda notes: state(0)) is None
    save(checkpoints, 2, 4, 6)
    again = opened()
    assert_restored(again.restore_latest(lambda notes: state(0)), 6)
    assert again.save(6, state(6), {})  # it is there already
    again.close()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]
    assert latest_notes(folder) == {"seconds": 3.0} and notes_of(folder, 5) == {}
    assert warnings == []


# Orbax leaves coroutines behind when a restore fails; they complain when collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_can_not_be_read_is_set_aside(opened, tmp_path, warnings):
    folder = tmp_path / "checkpoints"
    save(opened(), 2, 4)
    truncate(folder, 4)
    again = opened()
    assert_restored(again.restore_latest(lambda notes: state(0)), 2)
    (warning,) = warnings
    assert warning.startswith("the checkpoint of step 4 cannot be read: ")
    assert (folder / "unreadable-4").exists() and not (folder / "4").exists()
    again.close()

    truncate(folder, 2)
    again = opened()
    with pytest.raises(
        ValueError, match=f"{tmp_path} holds no checkpoint that can be read"
    ):
        again.restore_latest(lambda notes: state(0))
    again.close()
    gc.collect()


def test_a_full_disk_loses_the_checkpoint_and_says_so(opened, warnings, monkeypatch):
    checkpoints = opened()
    assert checkpoints.save(2, state(2), {"seconds": 1.0}) and checkpoints.wait()
    free = lambda folder: types.SimpleNamespace(free=10)
    monkeypatch.setattr(module.shutil, "disk_usage", free)
    assert not checkpoints.save(4, state(4), {})
    assert warnings == [
        "the checkpoint of step 4 was not written: it takes 64 bytes, and 10 are free"
    ]
    assert_restored(checkpoints.restore_latest(lambda notes: state(0)), 2)
    checkpoints.close()
