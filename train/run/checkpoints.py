"""Checkpoints of a run, written by Orbax beside the training loop."""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint._src.futures import synchronization

from train.cluster.session import Session


class Checkpoint(NamedTuple):
    """A checkpoint read back: its step, the state, and what was noted beside it."""

    step: int
    state: Any
    notes: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
      folder: where they lie, one folder per step.
      keep: how many to keep, the latest ones.
      warn: called with one line when a checkpoint cannot be written or read.
      session: the processes that write them together.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        keep: int,
        warn: Callable[[str], None],
        session: Session,
    ):
        self._folder, self._warn, self._session = folder.absolute(), warn, session
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        if session.has_others:
            meet = ocp.options.AsyncOptions(barrier_sync_fn=session.barriers)
            options = dataclasses.replace(options, async_options=meet)
        if session.has_lost_some and len(session.members) > 1:
            options = self._among_those_left(options)
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._unconfirmed: int | None = None

    def _among_those_left(
        self, options: ocp.CheckpointManagerOptions
    ) -> ocp.CheckpointManagerOptions:
        """Options for a manager that does not wait for those who are lost."""
        self._folder.mkdir(exist_ok=True)  # which such a manager does not do
        _catch_up(self._session)
        active = ocp.options.MultiprocessingOptions(
            active_processes=set(self._session.members),
            barrier_sync_key_prefix=self._session.group,
        )
        return dataclasses.replace(options, create=False, multiprocessing_options=active)

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> bool:
        """Begins to write a checkpoint; training may go on meanwhile.

        Returns:
          Whether it has been begun. Whether it arrives is known after `wait` or `close`; if
          it does not, the checkpoints before it are still there.
        """
        self.wait()
        if step not in self._manager.all_steps():
            needed, free = nbytes(state), self._free()
            if free < needed:
                self._unconfirmed = step
                self._failed(OSError(f"it takes {needed:,} bytes, and {free:,} are free"))
                return False
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes)
            )
            self._unconfirmed = step
            try:
                self._manager.save(step, args=args)
            except (OSError, ValueError, RuntimeError) as error:
                self._failed(error)
                return False
        return True

    def _free(self) -> int:
        """Bytes that are free, as the main process sees it."""
        # With several processes Orbax waits for minutes if not even folders can be made.
        return int(self._session.agree(str(shutil.disk_usage(self._folder).free)))

    def wait(self) -> bool:
        """Waits for the checkpoint being written; whether it has arrived safely."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            self._failed(error)
            return False
        self._unconfirmed = None
        return True

    def abandon(self) -> None:
        """Waits for what is being written, whether it arrives or not."""
        self._warn = lambda text: None
        self.wait()

    def _failed(self, error: Exception) -> None:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        self._warn(f"the checkpoint of step {self._unconfirmed} was not written: {reason}")

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
          ValueError: there are some, and none of them can be read.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                return _restore(self._manager, step, like)
            except ValueError as error:
                self._warn(str(error))
                self._set_aside(step)
        if any(self._folder.glob("unreadable-*")):
            raise ValueError(f"{self._folder.parent} holds no checkpoint that can be read")
        return None

    def _set_aside(self, step: int) -> None:
        self._session.wait_for_all()
        if self._session.is_main:
            target = self._folder / f"unreadable-{step}"
            (self._folder / str(step)).rename(target)
        self._session.wait_for_all()
        self._manager.reload()

    def close(self) -> bool:
        """Waits for the last checkpoint and ends; whether it has arrived safely."""
        arrived = self.wait()
        self._manager.close()
        return arrived


def _catch_up(session: Session) -> None:
    """Lets Orbax's processes go on with one number, by which they name where they meet.

    One that was about to write when another one was lost may be further than the others.
    """
    ids = synchronization.OperationIdGenerator
    furthest = max(map(int, session.gather(ids.get_current_operation_id())))
    while int(ids.get_current_operation_id()) < furthest:
        ids.next_operation_id()


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
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self.steps = sorted(self._manager.all_steps())

    def restore(self, step: int, like: Any) -> Checkpoint:
        """The checkpoint of a step, placed as the state `like`.

        Raises:
          ValueError: it cannot be read.
        """
        return _restore(self._manager, step, lambda notes: like)


def _restore(
    manager: ocp.CheckpointManager, step: int, like: Callable[[dict[str, Any]], Any]
) -> Checkpoint:
    """A checkpoint; ValueError if it cannot be read."""

    def read(**item: ocp.args.CheckpointArgs) -> Any:
        (name,) = item
        return manager.restore(step, args=ocp.args.Composite(**item))[name]

    try:
        notes = read(notes=ocp.args.JsonRestore())
        abstract = jax.tree.map(_abstract, like(notes))
        state = read(state=ocp.args.StandardRestore(abstract))
    except Exception as error:  # Orbax and TensorStore raise all kinds
        reason = (str(error).strip() or repr(error)).splitlines()[0][:200]
        raise ValueError(
            f"the checkpoint of step {step} cannot be read: {reason}"
        ) from error
    return Checkpoint(step, state, notes)


def _abstract(leaf: Any) -> Any:
    """What Orbax restores as such a leaf."""
    as_it_is = isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct)
    return leaf if as_it_is else ocp.utils.to_shape_dtype_struct(leaf)


def latest_notes(folder: pathlib.Path) -> dict[str, Any]:
    """What was noted beside the latest checkpoint in a folder; nothing if there is none."""
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
    found = (notes_of(folder, step) for step in sorted(steps, reverse=True))
    return next(filter(None, found), {})


def notes_of(folder: pathlib.Path, step: int) -> dict[str, Any]:
    """What was noted beside a checkpoint; nothing if that cannot be read.

    Reads the file itself: a checkpoint manager would make jax take its devices.
    """
    try:
        return json.loads((folder / str(step) / "notes" / "metadata").read_text())
    except (OSError, ValueError):
        return {}  # whoever restores the checkpoint says what is wrong with it


def nbytes(tree: Any) -> int:
    """The bytes of a tree of arrays, random keys among them.

    >>> nbytes({"x": jax.numpy.zeros((2, 3)), "key": jax.random.key(0)})
    32
    """
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
