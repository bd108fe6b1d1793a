"""Checkpoints of a few arrays."""

import gc
import resource
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
def opened(tmp_path, warnings):
    """Opens the checkpoints in a folder."""

    def opened(keep=2):
        folder = tmp_path / "checkpoints"
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
    assert (
        jax.random.key_data(restored["key"]) == jax.random.key_data(expected["key"])
    ).all()


def truncate(folder, step):
    """Removes the checksums of a checkpoint and truncates its arrays."""
    (folder / str(step) / checksums.CHECKSUMS).unlink()
    for path in (folder / str(step) / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:10])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_latest_ones_are_kept_and_restored(opened, tmp_path, warnings):
    checkpoints = opened()
    assert checkpoints.restore_latest(lambda notes: state(0)) is None
    save(checkpoints, 2, 4, 6)
    again = opened()
    assert_restored(again.restore_latest(lambda notes: state(0)), 6)
    assert again.save(6, state(6), {}) and warnings == []  # it exists
    assert not again.save(5, state(5), {})  # a resumed run would not find it
    late = "the checkpoint of step 5 was not written: the one of step 6 is later"
    assert again.close() and warnings == [late]
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]
    assert latest_notes(folder) == {"seconds": 3.0} and notes_of(folder, 5) == {}


def test_a_checkpoint_without_checksums_is_read_and_named(opened, tmp_path, warnings):
    save(opened(), 2)
    (tmp_path / "checkpoints" / "2" / checksums.CHECKSUMS).unlink()
    assert_restored(opened().restore_latest(lambda notes: state(0)), 2)
    (said,) = warnings
    assert said.startswith("the checkpoint of step 2 has no sha256.json: it is of an earl")


def test_the_latest_checkpoint_with_finite_losses_is_kept(opened, tmp_path):
    """In addition to the latest ones, which are kept anyway."""
    folder, kept = tmp_path / "checkpoints", []
    checkpoints = opened()
    for step, finite in [(1, True), (2, True), (3, False), (4, False), (5, False)]:
        assert (
            checkpoints.save(step, state(step), {"finite": finite}) and checkpoints.wait()
        )
        kept.append(sorted(int(path.name) for path in folder.iterdir()))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    assert checkpoints.latest_finite() == 2 and checkpoints.close()
    again = opened()
    assert again.latest_finite() == 2
    for step in (6, 7):
        assert again.save(step, state(step), {"finite": True})
    assert again.close() and steps_in(tmp_path / "checkpoints") == [6, 7]


def saved(checkpoints, step, tested, state=state):
    notes = {"tested": None if tested is None else {"error": tested, "loss": 0.0}}
    return checkpoints.save(step, state(step), notes) and checkpoints.wait()


def test_the_best_checkpoint_is_kept(opened, tmp_path):
    folder, kept = tmp_path / "checkpoints", []
    checkpoints = opened()
    for step, tested in [(1, 5.0), (2, 3.0), (3, None), (4, 3.0), (5, 4.0), (6, 9.0)]:
        assert saved(checkpoints, step, tested)
        kept.append(steps_in(folder))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    assert checkpoints.best() == (2, {"error": 3.0, "loss": 0.0}) and checkpoints.close()
    again = opened()  # which reads the notes
    assert again.best().step == 2
    assert saved(again, 7, 4.0) and steps_in(folder) == [2, 6, 7]
    assert saved(again, 8, 2.0) and steps_in(folder) == [7, 8] and again.close()


def test_a_kill_while_a_better_checkpoint_is_written_loses_none(opened, tmp_path):
    """No earlier checkpoint is removed before the new one has its name."""
    folder, checkpoints = tmp_path / "checkpoints", opened(keep=1)
    assert saved(checkpoints, 1, 3.0) and saved(checkpoints, 2, 5.0)
    seen, write = [], checksums.write

    def look(path):
        write(path)
        seen.append(steps_in(folder))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.checksums, "write", look)
        assert saved(checkpoints, 3, 1.0)
    assert seen == [[1, 2]] and steps_in(folder) == [3] and checkpoints.close()


def arrays(folder, step):
    """The largest file of a checkpoint."""
    every = (folder / str(step)).rglob("d/*")
    return max(every, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    "file", [arrays, lambda folder, step: folder / str(step) / "notes" / "metadata"]
)
def test_after_a_changed_byte_the_checkpoint_before_is_restored(
    file, opened, tmp_path, warnings, capfd
):
    folder = tmp_path / "checkpoints"
    save(opened(), 2, 4)
    flip_a_bit(file(folder, 4))
    assert notes_of(folder, 4) == {} or "metadata" not in str(file(folder, 4))
    again = opened()
    assert_restored(again.restore_latest(lambda notes: state(0)), 2)
    save(again, 4)  # and damaged a second time
    flip_a_bit(file(folder, 4))
    again = opened()
    assert_restored(again.restore_latest(lambda notes: state(0)), 2)
    again.close()
    assert (
        folder / "unreadable-4-2"
    ).is_dir() and "aside as unreadable-4-2" in warnings.pop()
    name = file(folder / "unreadable-4", "").relative_to(folder / "unreadable-4")
    assert warnings == [
        f"the checkpoint of step 4 cannot be read: {name} is not as it was written; it is "
        "set aside as unreadable-4"
    ]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "change, difference",
    [
        (
            lambda state: {**state, "x": state["x"][:, 1:]},
            r"x is float32\[2, 3\] in it, and ",
        ),
        (lambda state: {**state, "more": state["x"]}, "more is not in it"),
        (lambda state: {"x": state["x"], "key": state["key"]}, "host is in it, and not in"),
        (
            lambda state: {**state, "host": state["host"] * 1.0},
            r"host is int64\[3\] in it",
        ),
        (lambda state: {**state, "key": state["key"][:1]}, "key is uint32"),
    ],
)
def test_a_checkpoint_of_another_state_is_refused_and_left_alone(
    change, difference, opened, tmp_path, warnings
):
    save(opened(), 2, 4)
    before = files(tmp_path)
    again = opened()
    message = f"the checkpoint of step 4 is of another training state: {difference}"
    with pytest.raises(ValueError, match=message):
        again.restore_latest(lambda notes: change(state(0)))
    again.close()
    assert files(tmp_path) == before and warnings == []


@pytest.mark.parametrize("notes", [b"{}", b"[]", b"7", b"\xff"])
def test_after_incomplete_notes_the_checkpoint_before_is_restored(
    notes, opened, tmp_path, warnings
):
    folder = tmp_path / "checkpoints"
    save(opened(), 2, 4)
    (folder / "4" / checksums.CHECKSUMS).unlink()
    (folder / "4" / "notes" / "metadata").write_bytes(notes)
    again = opened()
    like = lambda notes: state(0) if notes["seconds"] else None
    assert_restored(again.restore_latest(like), 2)
    again.close()
    (warning,) = warnings
    assert (
        "step 4 cannot be read: its notes are incomplete (KeyError('seconds'))" in warning
    )


def test_an_undamaged_checkpoint_that_fails_to_restore_is_not_moved(
    opened, tmp_path, warnings, monkeypatch
):
    save(opened(), 2)
    before, again = files(tmp_path), opened()

    def fail(*_, **__):
        raise MemoryError("no room\nfor it")

    monkeypatch.setattr(module.ocp.Checkpointer, "restore", fail)
    with pytest.raises(ValueError, match="step 2 is as it was written, but"):
        again.restore_latest(lambda notes: state(0))
    again.close()
    assert files(tmp_path) == before and warnings == []


def test_a_partial_checkpoint_of_a_killed_run_is_removed(opened, tmp_path):
    save(opened(), 2)
    left = tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp" / "state"
    left.mkdir(parents=True)
    again = opened()
    assert not left.parent.exists() and steps_in(tmp_path / "checkpoints") == [2]
    again.close()


# Orbax leaves coroutines behind when a restore fails; they complain when collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_unreadable_checkpoint_is_set_aside(opened, tmp_path, warnings):
    folder = tmp_path / "checkpoints"
    save(opened(), 2, 4)
    truncate(folder, 4)
    again = opened()
    assert_restored(again.restore_latest(lambda notes: state(0)), 2)
    (warning,) = warnings
    assert warning.startswith("the checkpoint of step 4 cannot be read: OUT_OF_RANGE: ")
    assert warning.endswith("; it is set aside as unreadable-4")
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


def alive():
    """Threads that keep a process alive."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def have_ended(but):
    """Waits for these threads to end, except some. Returns whether they did."""
    deadline = time.monotonic() + 5
    while not alive() <= but and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return alive() <= but


def test_a_folder_that_cannot_be_written_to_leaves_no_thread(
    opened, tmp_path, warnings, monkeypatch, capfd
):
    """Here Orbax itself finds out."""
    monkeypatch.setattr(module, "_obstacle", lambda folder, needed: "")
    checkpoints, before = opened(), alive()
    folder = tmp_path / "checkpoints"
    folder.rename(tmp_path / "moved")
    folder.write_text("in the way")
    for step in (2, 4):
        assert not checkpoints.save(step, state(step), {})
    assert checkpoints.close() and steps_in(tmp_path / "checkpoints") == []
    assert have_ended(but=before)
    assert len(warnings) == 2
    assert warnings[1].startswith("the checkpoint of step 4 was not written: [Errno ")
    gc.collect()
    assert capfd.readouterr() == ("", "")


# Orbax leaves coroutines behind when a write fails; they complain when collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_becomes_full_while_writing(opened, tmp_path, warnings):
    """Simulated by a limit of 20 kB for each file. A better checkpoint replaces none."""
    noise = np.random.default_rng(0).bytes(200_000)
    large = {"x": np.frombuffer(noise, np.uint8)}
    folder, checkpoints, before = tmp_path / "checkpoints", opened(keep=1), alive()
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
    assert steps_in(folder) == [1, 4] and have_ended(but=before)


def test_a_missing_checkpoint_folder_is_created_again(opened, tmp_path):
    checkpoints, folder = opened(), tmp_path / "checkpoints"
    assert checkpoints.save(2, state(2), {}) and checkpoints.wait()
    folder.rename(tmp_path / "moved")
    for step in (4, 6, 8):  # 4 is removed, and 2 would be
        assert checkpoints.save(step, state(step), {}) and checkpoints.wait()
    assert checkpoints.close() and steps_in(tmp_path / "checkpoints") == [6, 8]


def test_a_failure_of_orbax_while_closing_does_not_fail_the_run(opened, monkeypatch):
    """For example because a file of its own was moved while it was written."""

    def fail(manager, close=module.ocp.CheckpointManager.close):
        close(manager)
        raise FileNotFoundError("_CHECKPOINT_METADATA")

    checkpoints = opened()
    assert checkpoints.save(2, state(2), {})
    monkeypatch.setattr(module.ocp.CheckpointManager, "close", fail)
    assert not checkpoints.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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
