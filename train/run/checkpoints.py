"""Checkpoints of a run, written by Orbax beside the training loop."""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.cluster.session import Session
from train.run import checksums, noise
from train.run.folder import unused
from train.run.keeping import KeepLatestAndFinite
from train.run.reading import Checkpoint, Unreadable, one_line, read


TEMPORARY = ".orbax-checkpoint-tmp"  # the end of the name of a folder that is being written
BARRIER_S = (
    300  # that processes wait for one another; one may have failed to write its part
)


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
        noise.silence()
        self._remove_leftovers()
        self._preservation = KeepLatestAndFinite(self._folder, keep)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._preservation,
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
        self._preservation.note(step, notes.get("finite", True))
        try:
            self._manager.save(step, args=args)
        except (OSError, ValueError, RuntimeError) as error:
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
        except (OSError, ValueError, RuntimeError) as error:
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
        return self._preservation.latest_finite(self.steps)

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
        self._manager.close()
        return arrived


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
