"""Checkpoints of a run, written by Orbax beside the training loop."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from train.processes import is_main, wait_for_all


class Restored(NamedTuple):
    """A checkpoint read back: its step, the state, and what was noted beside it."""

    step: int
    state: Any
    notes: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
      folder: where they lie, one folder per step.
      keep: how many to keep, the latest ones.
      warn: called with one line when a checkpoint can not be written or read.
    """

    def __init__(self, folder: pathlib.Path, keep: int, warn: Callable[[str], None]):
        self._folder, self._warn = folder.absolute(), warn
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._unconfirmed: int | None = None

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> bool:
        """Begins to write a checkpoint; training may go on meanwhile.

        Returns:
          Whether it has been begun. Whether it arrives is known after `wait` or `close`; if
          it does not, the checkpoints before it are still there.
        """
        self.wait()
        if step not in self._manager.all_steps():
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

    def wait(self) -> bool:
        """Waits for the checkpoint being written; whether it has arrived safely."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            self._failed(error)
            return False
        self._unconfirmed = None
        return True

    def _failed(self, error: Exception) -> None:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        self._warn(f"the checkpoint of step {self._unconfirmed} was not written: {reason}")

    def restore_latest(self, like: Any) -> Restored | None:
        """The latest checkpoint that can be read, placed as the state `like`.

        One that can not be read (truncated, say) is set aside as `unreadable-STEP`, and the
        one before it is tried.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), notes=ocp.args.JsonRestore()
        )
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                read = self._manager.restore(step, args=args)
            except Exception as error:  # Orbax and TensorStore raise all kinds
                reason = str(error).strip().splitlines()[0][:200]
                self._warn(f"the checkpoint of step {step} can not be read: {reason}")
                self._set_aside(step)
                continue
            return Restored(step, read["state"], read["notes"])
        return None

    def _set_aside(self, step: int) -> None:
        wait_for_all(f"unreadable-{step}")
        if is_main():
            target = self._folder / f"unreadable-{step}"
            (self._folder / str(step)).rename(target)
        wait_for_all(f"set-aside-{step}")
        self._manager.reload()

    def close(self) -> bool:
        """Waits for the last checkpoint and ends; whether it has arrived safely."""
        arrived = self.wait()
        self._manager.close()
        return arrived
