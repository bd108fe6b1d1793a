"""Checkpoints of a few arrays."""

import gc
import re
import resource
import threading
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from outside import times, until

from train.cluster.session import Session
from train.run import checkpoints as module
from train.run import checksums
from train.run.checkpoints import Checkpoints, latest_notes, notes_of, steps_in
from train.run.lock import RunLock


def state(step):
    key = jax.random.split(jax.random.key(step), 2)
    return {"x": step + jnp.arange(6.0).reshape(2, 3), "host": np.full(3, step), "key": key}


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def opened(folder, warnings):
    """Opens the checkpoints in a folder."""

    def opened(keep=2):
        return Checkpoints(folder, keep, warnings.append, Session())

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
    assert (restored["key"] == expected["key"]).all()


def test_the_latest_ones_are_kept_and_restored(opened, folder, warnings):
    checkpoints = opened()
    assert checkpoints.restore_latest(lambda notes: state(0)) is None
    save(checkpoints, 2, 4, 6)
    again = opened()
    assert_restored(again.restore_latest(lambda notes: state(0)), 6)
    assert again.save(6, state(6), {}) and warnings == []  # it exists
    assert not again.save(5, state(5), {})  # a resumed run would not find it
    late = "the checkpoint of step 5 was not written: the one of step 6 is later"
    assert again.close() and warnings == [late]
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]
    assert latest_notes(folder) == {"seconds": 3.0}
    assert latest_notes(folder / "none") == notes_of(folder, 5) == {}


def test_a_process_that_may_be_lost_saves_and_restores_its_arrays_on_the_host(folder):
    session = Session(0, ["host"], words=Mock())
    save(Checkpoints(folder, 2, pytest.fail, session), 3)
    opened = Checkpoints(folder, 2, pytest.fail, session)
    step, restored, _ = opened.restore_latest(lambda notes: state(0))
    assert step == 3
    assert all(isinstance(x, np.ndarray) for x in restored.values())
    expected = state(3) | {"key": jax.random.key_data(state(3)["key"])}
    for name, x in expected.items():
        np.testing.assert_array_equal(restored[name], x)


def test_a_checkpoint_without_checksums_is_read_and_named(opened, folder, warnings):
    save(opened(), 2)
    (folder / "2" / checksums.CHECKSUMS).unlink()
    assert_restored(opened().restore_latest(lambda notes: state(0)), 2)
    (said,) = warnings
    assert said.startswith("the checkpoint of step 2 has no sha256.json: it is of an earl")


@pytest.mark.slow
def test_the_latest_checkpoint_with_finite_losses_is_kept(opened, folder):
    """In addition to the latest ones, which are kept anyway."""
    checkpoints, kept = opened(), []
    for step, finite in [(1, True), (2, True), (3, False), (4, False), (5, False)]:
        assert checkpoints.save(step, state(step), {"finite": finite})
        assert checkpoints.wait()
        kept.append(steps_in(folder))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    assert checkpoints.latest_finite() == 2 and checkpoints.close()
    again = opened()
    assert again.latest_finite() == 2
    for step in (6, 7):
        assert again.save(step, state(step), {"finite": True})
    assert again.close() and steps_in(folder) == [6, 7]


def saved(checkpoints, step, tested, state=state):
    notes = {"tested": None if tested is None else {"error": tested, "loss": 0.0}}
    return checkpoints.save(step, state(step), notes) and checkpoints.wait()


@pytest.mark.slow
def test_the_best_checkpoint_is_kept(opened, folder):
    checkpoints, kept = opened(), []
    for step, tested in [(1, 5.0), (2, 3.0), (3, None), (4, 3.0), (5, 4.0), (6, 9.0)]:
        assert saved(checkpoints, step, tested)
        kept.append(steps_in(folder))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    assert checkpoints.best() == (2, {"error": 3.0, "loss": 0.0}) and checkpoints.close()
    again = opened()  # which reads the notes
    assert again.best().step == 2
    assert saved(again, 7, 4.0) and steps_in(folder) == [2, 6, 7]
    assert saved(again, 8, 2.0) and steps_in(folder) == [7, 8] and again.close()


def test_a_kill_while_a_better_checkpoint_is_written_loses_none(opened, folder):
    """No earlier checkpoint is removed before the new one has its name."""
    checkpoints = opened(keep=1)
    assert saved(checkpoints, 1, 3.0) and saved(checkpoints, 2, 5.0)
    seen, write = [], checksums.write

    def look(path):
        write(path)
        seen.append(steps_in(folder))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.checksums, "write", look)
        assert saved(checkpoints, 3, 1.0)
    assert seen == [[1, 2]] and steps_in(folder) == [3] and checkpoints.close()


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def flip_arrays(folder):
    flip_a_bit(max(folder.rglob("d/*"), key=lambda path: path.stat().st_size))


def flip_notes(folder):
    flip_a_bit(folder / "notes" / "metadata")


def truncate(folder):
    (folder / checksums.CHECKSUMS).unlink()
    for path in (folder / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:10])


def spoil_notes(folder):
    (folder / checksums.CHECKSUMS).unlink()
    (folder / "notes" / "metadata").write_bytes(b"\xff")


# Orbax leaves coroutines behind when a restore fails; they complain when collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "damage, reason, seconds",
    [
        (flip_arrays, r"state/.*d/\w+ is not as it was written", 5),
        (truncate, "OUT_OF_RANGE: .*", 5),
        (spoil_notes, r"its notes are incomplete .KeyError.'seconds'..", 4.5),
    ],
)
def test_after_damage_the_checkpoint_before_is_restored(
    damage, reason, seconds, opened, folder, warnings, capfd
):
    save(opened(), 9, 10)
    damage(folder / "10")
    assert latest_notes(folder) == {"seconds": seconds}
    again = opened()
    like = lambda notes: state(0) if notes["seconds"] else None
    assert_restored(again.restore_latest(like), 9)
    again.close()
    (warning,) = warnings
    message = f"the checkpoint of step 10 cannot be read: {reason}; it is set aside as "
    assert re.fullmatch(f"{message}unreadable-10", warning)
    assert (folder / "unreadable-10").is_dir() and steps_in(folder) == [9]
    assert capfd.readouterr() == ("", "")
    gc.collect()


def test_after_damage_of_all_checkpoints_there_is_none_to_resume(
    opened, folder, tmp_path, warnings
):
    for name in ("unreadable-4", "unreadable-4-2"):
        save(opened(), 4)
        flip_notes(folder / "4")
        again = opened()
        with pytest.raises(ValueError, match=f"{tmp_path} holds no checkpoint that can be"):
            again.restore_latest(lambda notes: state(0))
        again.close()
        assert (folder / name).is_dir() and warnings.pop().endswith(f"aside as {name}")


@pytest.mark.parametrize(
    "changes, difference",
    [
        ({"x": np.zeros((2, 2), np.float32)}, r"x is float32\[2, 3\] in it, and "),
        ({"more": np.zeros(3)}, "more is not in it"),
        ({"host": np.zeros(3)}, r"host is int64\[3\] in it"),
        ({"key": jax.random.split(jax.random.key(0), 1)}, "key is uint32"),
        ({"host": {}}, "host is in it, and not in"),
    ],
)
def test_a_checkpoint_of_another_state_is_refused_and_left_alone(
    changes, difference, opened, tmp_path, warnings
):
    save(opened(), 2, 4)
    before = times(tmp_path)
    again = opened()
    message = f"the checkpoint of step 4 is of another training state: {difference}"
    with pytest.raises(ValueError, match=message):
        again.restore_latest(lambda notes: state(0) | changes)
    again.close()
    assert times(tmp_path) == before and warnings == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            MemoryError("no room\nfor it"),
            "step 2 is as it was written, but reading it failed",
        ),
        (ValueError("UNKNOWN: Gloo AllGather failed"), "^UNKNOWN: Gloo AllGather failed$"),
    ],
)
def test_an_undamaged_checkpoint_that_fails_to_restore_is_not_moved(
    opened, tmp_path, warnings, monkeypatch, error, message
):
    """The second error means that another process was lost."""
    save(opened(), 2)
    before, again = times(tmp_path), opened()
    monkeypatch.setattr(module.ocp.Checkpointer, "restore", Mock(side_effect=error))
    with pytest.raises(ValueError, match=message):
        again.restore_latest(lambda notes: state(0))
    again.close()
    assert times(tmp_path) == before and warnings == []


def test_a_partial_checkpoint_of_a_killed_run_is_removed(opened, folder):
    save(opened(), 2)
    left = folder / "4.orbax-checkpoint-tmp" / "state"
    left.mkdir(parents=True)
    again = opened()
    assert not left.parent.exists() and steps_in(folder) == [2]
    again.close()


def alive():
    """Threads that keep a process alive."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def have_ended(but):
    """Whether these threads have ended, except some."""
    gc.collect()
    return alive() <= but


def test_a_folder_that_cannot_be_written_to_leaves_no_thread(
    opened, folder, tmp_path, warnings, monkeypatch, capfd
):
    """Here Orbax itself finds out."""
    monkeypatch.setattr(module, "_obstacle", lambda folder, needed: "")
    checkpoints, before = opened(), alive()
    folder.rename(tmp_path / "moved")
    folder.write_text("in the way")
    for step in (2, 4):
        assert not checkpoints.save(step, state(step), {})
    assert checkpoints.close() and steps_in(folder) == []
    until(lambda: have_ended(but=before), seconds=5)
    assert len(warnings) == 2
    assert warnings[1].startswith("the checkpoint of step 4 was not written: [Errno ")
    gc.collect()
    assert capfd.readouterr() == ("", "")


def test_a_disk_that_becomes_full_while_writing(opened, folder, warnings):
    """Simulated by a limit of 20 kB for each file. A better checkpoint replaces none."""
    noise = np.random.default_rng(0).bytes(200_000)
    large = {"x": np.frombuffer(noise, np.uint8)}
    checkpoints, before = opened(keep=1), alive()
    assert saved(checkpoints, 1, 3.0) and saved(checkpoints, 2, 5.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        assert checkpoints.save(3, large, {"tested": {"error": 1.0, "loss": 0.0}})
        assert not checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (warning,) = warnings
    assert "the checkpoint of step 3 was not written: " in warning and len(warning) < 300
    assert "File too large" in warning
    # Nothing is left of it.
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    assert checkpoints.best().step == 1
    assert saved(checkpoints, 4, 6.0, lambda step: large) and checkpoints.close()
    assert steps_in(folder) == [1, 4]
    until(lambda: have_ended(but=before), seconds=5)


def test_a_missing_checkpoint_folder_is_created_again(opened, folder, tmp_path):
    checkpoints = opened()
    assert checkpoints.save(2, state(2), {}) and checkpoints.wait()
    folder.rename(tmp_path / "moved")
    for step in (4, 6, 8):  # 4 is removed, and 2 would be
        assert checkpoints.save(step, state(step), {}) and checkpoints.wait()
    assert checkpoints.close() and steps_in(folder) == [6, 8]


def test_a_failure_of_orbax_while_closing_does_not_fail_the_run(opened, monkeypatch):
    """For example because a file of its own was moved while it was written."""

    def fail(manager, close=module.ocp.CheckpointManager.close):
        close(manager)
        raise FileNotFoundError("_CHECKPOINT_METADATA")

    checkpoints = opened()
    assert checkpoints.save(2, state(2), {})
    monkeypatch.setattr(module.ocp.CheckpointManager, "close", fail)
    assert not checkpoints.close()


def test_a_run_folder_moved_while_a_checkpoint_is_written_is_not_recreated(
    tmp_path, warnings
):
    """Orbax would create a folder without the other files of the run."""
    folder, moved = tmp_path / "run", threading.Event()
    folder.mkdir()
    held = RunLock(folder, pytest.fail, pytest.fail)
    held.sign()

    def check():
        if threading.current_thread() is not threading.main_thread():
            assert moved.wait(30)
        held.check()

    checkpoints = Checkpoints(folder / "checkpoints", 2, warnings.append, Session(), check)
    assert checkpoints.save(2, state(2), {})
    folder.rename(tmp_path / "moved")
    moved.set()
    assert not checkpoints.wait() and steps_in(folder / "checkpoints") == []
    assert not checkpoints.save(4, state(4), {})
    checkpoints.close()
    for step, warning in zip((2, 4), warnings, strict=True):
        assert warning.startswith(f"the checkpoint of step {step} was not written: ")
        assert "the run folder is gone or was moved" in warning


def test_fields_of_an_earlier_version(opened, folder):
    """Counters that it did not save begin at 0; an empty field may be gone."""
    pull = {"restored": jnp.int32(3), "rule": [jnp.ones(2), {"dropped": jnp.ones(2)}]}
    checkpoints = opened()
    checkpoints.save(1, {"pulls": [pull | {"late": ()}], "x": jnp.ones(2)}, {})
    checkpoints.close()
    new = {"pulls": [pull | {"dropped": jnp.int32(5)}], "x": jnp.zeros(2)}
    found = opened().restore_latest(lambda notes: new)
    expected = {"pulls": [pull | {"dropped": jnp.int32(0)}], "x": jnp.ones(2)}
    jax.tree.map(np.testing.assert_array_equal, found.state, expected)


def test_the_next_interface_of_orbax_reads_them(opened, folder):
    """MaxText and Tunix load by it. It needs shapes, which the folder has, and a device."""
    from orbax.checkpoint.experimental import v1

    save(opened(), 4)
    known = v1.checkpointables_metadata(folder / "4").metadata["state"]["x"]
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    x = jax.ShapeDtypeStruct(known.shape, known.dtype, sharding=here)
    like = {"x": x, "host": v1.PLACEHOLDER, "key": v1.PLACEHOLDER}
    found = v1.load(folder / "4", like, checkpointable_name="state")
    np.testing.assert_array_equal(found["x"], state(4)["x"])
