"""Checkpoints of a run: written beside the training loop, read whole or not at all."""

import json
import logging
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from train.cluster.session import Session
from train.run import checksums
from train.run.folder import unused


TEMPORARY = ".orbax-checkpoint-tmp"  # the end of the name of a folder that is being written
# That processes wait for one another; one may have failed to write its part.
BARRIER_S = 300
FAILURES = (OSError, ValueError, RuntimeError)  # as which Orbax raises what went wrong
NOTES = "notes/metadata"  # the file of what was noted beside a checkpoint


class Checkpoint(NamedTuple):
    """A checkpoint read back: its step, the state, and what was noted beside it."""

    step: int
    state: Any
    notes: dict[str, Any]


class Unreadable(ValueError):
    """A checkpoint that is damaged: another one may be read in its place."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"the checkpoint of step {step} cannot be read: {reason}")


class LatestFinite(checkpoint_managers.PreservationPolicy):
    """Keeps the latest checkpoint with finite losses.

    Without it a run that diverges, and saves often, would soon have no checkpoint left from
    which it could go on. Orbax's `BestN` reads its metrics from files of their own: if one
    is damaged, Orbax opens no checkpoint any more.

    Args:
      folder: of the checkpoints.

    Attributes:
      known: whether the losses of a step are finite, also before its checkpoint is written.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder, self.known = folder, {}

    def latest(self, steps: Iterable[int]) -> int | None:
        """The latest of the steps whose checkpoint has finite losses, if any has."""
        return max(filter(self._is_finite, steps), default=None)

    def _is_finite(self, step: int) -> bool:
        if step not in self.known:
            self.known[step] = bool(notes_of(self._folder, step).get("finite", True))
        return self.known[step]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which of the checkpoints, from the oldest to the latest, are kept."""
        latest = self.latest(checkpoint.step for checkpoint in checkpoints)
        return [checkpoint.step == latest for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
      folder: where they lie, one folder per step.
      keep: how many to keep, the latest ones; and the latest with finite losses.
      warn: called with one line when a checkpoint cannot be written or read.
      session: the processes that write them together.
      check: called before files are written; raises OSError if the run folder is gone, and
        does not return if another run has taken it.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        keep: int,
        warn: Callable[[str], None],
        session: Session,
        check: Callable[[], None] = lambda: None,
    ):
        self._folder, self._warn, self._session = folder.absolute(), warn, session
        self._check = check
        _silence()
        self._remove_leftovers()
        self._finite = LatestFinite(self._folder)
        policies = [checkpoint_managers.LatestN(keep), self._finite]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=BARRIER_S,
                post_finalization_callback=self._write_checksums,
                # If it made them in a thread and could not, its other threads would wait
                # for it for ever, and the process would never end.
                create_directories_asynchronously=False,
            ),
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._unconfirmed: int | None = None

    def _remove_leftovers(self) -> None:
        """Removes what was being written when a run was killed, or a disk was full."""
        if self._session.is_main:
            for path in self._folder.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _write_checksums(self) -> None:
        """Orbax calls this when all files are there, and their folder is to be renamed.

        Orbax makes a folder anew that was moved while it wrote: `check` notices that.
        """
        self._check()
        checksums.write(self._folder / f"{self._unconfirmed}{TEMPORARY}")

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> bool:
        """Begins to write a checkpoint; training may go on meanwhile.

        Args:
          notes: what to keep beside it; `finite` says whether its losses are.

        Returns:
          Whether it has been begun, or is there. Whether it arrives is known after `wait`
          or `close`; if it does not, the checkpoints before it are still there.
        """
        self.wait()
        if step in self._manager.all_steps():
            return True
        self._unconfirmed = step
        obstacle = self._obstacle(nbytes(state))
        if obstacle:
            self._failed(obstacle)
            return False
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes)
        )
        self._finite.known[step] = notes.get("finite", True)
        try:
            self._manager.save(step, args=args)
        except FAILURES as error:
            self._failed(error)
            return False
        return True

    def _obstacle(self, needed: int) -> str:
        """Why so many bytes cannot be written, as the main process sees it; or nothing.

        With several processes Orbax waits for minutes if not even folders can be made.
        """
        found = self._gone()
        if self._session.is_main and not found:
            found = _obstacle(self._folder, needed)
        return self._session.agree(found)

    def _gone(self) -> str:
        """Why the run folder is not there, as the main process sees it; or nothing."""
        try:
            self._check()
        except OSError as error:
            return f"{error.strerror}: {error.filename}"
        return ""

    def wait(self) -> bool:
        """Waits for the checkpoint being written; whether it has arrived safely."""
        try:
            self._manager.wait_until_finished()
        except FAILURES as error:
            self._failed(self._gone() or error)
            return False
        if self._unconfirmed is not None and (gone := self._gone()):
            self._failed(gone)
            return False
        self._unconfirmed = None
        return True

    def _failed(self, error: Exception | str) -> None:
        step, self._unconfirmed = self._unconfirmed, None
        self._warn(f"the checkpoint of step {step} was not written: {one_line(error)}")
        self._remove_leftovers()

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, in order."""
        there = lambda step: (self._folder / str(step)).is_dir()  # may have been removed
        return sorted(filter(there, self._manager.all_steps()))

    def latest_finite(self) -> int | None:
        """The step of the latest checkpoint with finite losses."""
        return self._finite.latest(self.steps)

    def restore_latest(self, like: Callable[[dict[str, Any]], Any]) -> Checkpoint | None:
        """The latest checkpoint that can be read.

        One that cannot be read (truncated, say) is set aside as `unreadable-STEP`, and the
        one before it is tried.

        Args:
          like: from what was noted beside a checkpoint, a state of the same shapes: arrays
            come back placed as its arrays are, and as host arrays where it has these.

        Returns:
          None if no checkpoint has been written yet.

        Raises:
          ValueError: there are some, and none of them can be read; or one is of another
            state than `like`, which changes no file.
        """
        for step in reversed(self.steps):
            try:
                return self._restore(step, like)
            except Unreadable as error:
                aside = unused(self._folder / f"unreadable-{step}")
                self._warn(f"{error}; it is set aside as {aside.name}")
                self._set_aside(step, aside)
        if any(self._folder.glob("unreadable-*")):
            raise ValueError(f"{self._folder.parent} holds no checkpoint that can be read")
        return None

    def _restore(self, step: int, like: Callable[[dict[str, Any]], Any]) -> Checkpoint:
        damage = ""
        if self._session.is_main:
            damage = checksums.damage(self._folder / str(step))
        if damage := self._session.agree(damage):
            raise Unreadable(step, damage)
        return read(self._manager, self._folder, step, like)

    def _set_aside(self, step: int, target: pathlib.Path) -> None:
        self._session.wait_for_all()
        if self._session.is_main:
            (self._folder / str(step)).rename(target)
        self._session.wait_for_all()
        self._manager.reload()

    def close(self) -> bool:
        """Waits for the last checkpoint and ends; whether it has arrived safely."""
        arrived = self.wait()
        try:
            self._manager.close()
        except FAILURES:  # of files that were in the way or gone before, too
            return False
        return arrived


class Archive:
    """The checkpoints of a run folder, to read: nothing in it is changed.

    Args:
      folder: where they lie, one folder per step.

    Attributes:
      steps: the steps of which there is a checkpoint, in order.
    """

    def __init__(self, folder: pathlib.Path):
        # Not `read_only`: Orbax would warn of it, and writes nothing unless told to anyway.
        options = ocp.CheckpointManagerOptions(create=False)
        _silence()
        self._folder = folder.absolute()
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self.steps = sorted(self._manager.all_steps())

    def restore(self, step: int, like: Any) -> Checkpoint:
        """The checkpoint of a step, placed as the state `like`.

        Raises:
          ValueError: it cannot be read.
        """
        if damage := checksums.damage(self._folder / str(step)):
            raise Unreadable(step, damage)
        return read(self._manager, self._folder, step, lambda notes: like)


def read(
    manager: ocp.CheckpointManager,
    folder: pathlib.Path,
    step: int,
    like: Callable[[dict[str, Any]], Any],
) -> Checkpoint:
    """A checkpoint whose files are as they were written, as far as checksums tell.

    Args:
      manager: of the checkpoints in `folder`.
      like: see `Checkpoints.restore_latest`.

    Raises:
      Unreadable: it is damaged. ValueError: it is not, but of another state than `like`, or
        something else is in the way.
    """
    noted = notes_of(folder, step)
    try:
        wanted = jax.tree.map(_abstract, like(noted))
    except (KeyError, TypeError, AttributeError) as error:
        raise Unreadable(step, f"its notes are incomplete ({error!r})") from error
    try:
        difference = _first_difference(folder / str(step) / "state", wanted)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        state = None if difference else manager.restore(step, args=args)["state"]
    except Exception as error:  # Orbax and TensorStore raise all kinds
        reason = one_line(error)
        if not checksums.are_there(folder / str(step)):
            raise Unreadable(step, reason) from error
        raise ValueError(
            f"the checkpoint of step {step} is as it was written, but reading it failed: "
            f"{reason}"
        ) from error
    if difference:
        raise ValueError(
            f"the checkpoint of step {step} is of another training state: {difference}"
        )
    return Checkpoint(step, state, noted)


def _abstract(leaf: Any) -> Any:
    """What Orbax restores as such a leaf."""
    as_it_is = isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct)
    return leaf if as_it_is else ocp.utils.to_shape_dtype_struct(leaf)


def _first_difference(path: pathlib.Path, wanted: Any) -> str:
    """In which array a saved state differs from the one wanted; nothing if in none."""
    saved = ocp.StandardCheckpointHandler().metadata(path)  # type: ignore  # takes any path
    there = _by_name(saved.tree)
    here = _by_name(ocp.tree.serialize_tree(wanted, keep_empty_nodes=True))
    for name in sorted(there.keys() | here.keys()):
        if name not in here:
            return f"{name} is in it, and not in this run"
        if name not in there:
            return f"{name} is not in it"
        a, b = there[name], here[name]
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):  # saved as integers
            same = a.shape[: len(b.shape)] == b.shape
        else:
            same = (a.shape, a.dtype) == (b.shape, b.dtype)
        if not same:
            return f"{name} is {_typed(a)} in it, and {_typed(b)} in this run"
    return ""


def _by_name(tree: Any) -> dict[str, Any]:
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _typed(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def one_line(error: Exception | str) -> str:
    """What an error says: its first line, and of a long one the beginning and the end.

    >>> one_line(ValueError("RESOURCE_EXHAUSTED: no space [os_error_code='28']"))
    'RESOURCE_EXHAUSTED: no space'
    """
    line = (str(error).strip() or repr(error)).splitlines()[0]
    line = re.sub(r" \[(os_error_code|tensorstore_spec|source locations).*", "", line)
    return line if len(line) <= 200 else f"{line[:100]} … {line[-100:]}"


def latest_notes(folder: pathlib.Path) -> dict[str, Any]:
    """What was noted beside the latest checkpoint in a folder; nothing if there is none."""
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
    found = (notes_of(folder, step) for step in sorted(steps, reverse=True))
    return next(filter(None, found), {})


def notes_of(folder: pathlib.Path, step: int) -> dict[str, Any]:
    """What was noted beside a checkpoint; nothing if that cannot be read.

    Reads the file itself: a checkpoint manager would make jax take its devices.
    """
    if checksums.damage(folder / str(step), only=NOTES):
        return {}  # whoever restores the checkpoint says what is wrong with it
    try:
        noted = json.loads((folder / str(step) / NOTES).read_text())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _obstacle(folder: pathlib.Path, needed: int) -> str:
    """Why so many bytes cannot be written to a folder; nothing if nothing is in the way."""
    try:
        folder.mkdir(exist_ok=True)  # may have been removed; a run folder is not made anew
        probe = folder / f"probe{TEMPORARY}"
        probe.mkdir(exist_ok=True)
        probe.rmdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{error.strerror}: {folder}"
    return "" if needed <= free else f"it takes {needed:,} bytes, and {free:,} are free"


def nbytes(tree: Any) -> int:
    """The bytes of a tree of arrays, random keys among them.

    >>> nbytes({"x": jax.numpy.zeros((2, 3)), "key": jax.random.key(0)})
    32
    """
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _silence() -> None:
    """Has Orbax and TensorStore print nothing of what they also raise."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _show_unless_noise


def _show_unless_noise(unraisable: Any) -> None:
    """TensorStore tells a loop that has ended of each failure after the first one."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
