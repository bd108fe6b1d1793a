"""Checkpoints of a run: written asynchronously, and restored whole or not at all."""

import contextlib
import functools
import itertools
import json
import logging
import math
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers
from orbax.checkpoint._src.serialization import type_handlers

from train.cluster.session import Session, is_of_loss
from train.metrics import measures
from train.process.messages import one_line
from train.run import checksums
from train.run.folder import unused


TEMPORARY = ".orbax-checkpoint-tmp"  # suffix of a folder that is being written
BARRIER_S = 300  # timeout of a process that waits for another one to write its part
FAILURES = (OSError, ValueError, RuntimeError)  # exceptions that Orbax raises
NOTES = "notes/metadata"  # the file with the notes of a checkpoint
# Of exchanges, since 0.3
NEW_COUNTERS = ("dropped", "dropped_in_a_row", "missed", "stage", "takes_part")
TESTED = "tested.json"  # the result of a test that ended after the checkpoint
MODEL = "model"  # the item of a checkpoint that holds the center


class Checkpoint(NamedTuple):
    """A restored checkpoint: its step, the state, and the notes saved with it."""

    step: int
    state: Any
    notes: dict[str, Any]


class Unreadable(ValueError):
    """A checkpoint is damaged; an earlier one may be restored in its place."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"the checkpoint of step {step} cannot be read: {reason}")


class Best(NamedTuple):
    """The checkpoint with the best test: its step, and the result of the center."""

    step: int
    tested: dict[str, float]

    @property
    def value(self) -> float:
        """The first measure of the test; lower is better."""
        return measures.first(self.tested)


class BestAndFinite(checkpoint_managers.PreservationPolicy):
    """Keeps the checkpoint with the best test and the latest one with finite losses.

    Without them, a diverging run that saves often would soon have no checkpoint left to
    use or to continue from. Orbax's `BestN` reads metrics from files of its own. If one of
    these is damaged, Orbax opens no checkpoint any more.

    Args:
      folder: the folder of the checkpoints.

    Attributes:
      known: {step: notes}, set before a checkpoint is written.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self.known = {}

    def latest_finite(self, steps: Iterable[int]) -> int | None:
        """Returns the latest of the steps whose losses are finite, or None."""

        def finite(step):
            return self._notes(step).get("finite", True)

        return max(filter(finite, steps), default=None)

    def best(self, steps: Iterable[int]) -> Best | None:
        """Returns the best of the tested steps, the earliest of equals, or None."""
        found = (Best(step, self._notes(step).get("tested") or {}) for step in steps)
        tested = [x for x in found if x.tested and math.isfinite(x.value)]
        return min(tested, key=lambda x: (x.value, x.step), default=None)

    def add_test(self, step: int, tested: dict[str, float]) -> None:
        """Adds the result of a test to the notes of a step."""
        self.known[step] = self._notes(step) | {"tested": tested}

    def _notes(self, step: int) -> dict[str, Any]:
        if step not in self.known:
            self.known[step] = notes_of(self._folder, step)
        return self.known[step]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether to keep each of the checkpoints, which are sorted by step."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = self.best(steps)
        kept = {self.latest_finite(steps), best and best.step}
        return [step in kept for step in steps]


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
      folder: holds one folder per step.
      keep: number of latest checkpoints to keep, besides the best one and the latest with
        finite losses.
      warn: called with one line when a checkpoint cannot be written or read.
      session: the processes that write together.
      check: called before files are written. Raises OSError if the run folder is gone, and
        does not return if another run has taken it over.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        keep: int,
        warn: Callable[[str], None],
        session: Session,
        check: Callable[[], None] = lambda: None,
    ):
        self._folder = folder.absolute()
        self._warn = warn
        self._session = session
        self._check = check
        _silence()
        self._remove_leftovers()
        self._policy = BestAndFinite(self._folder)
        policies = [checkpoint_managers.LatestN(keep), self._policy]
        processes = _processes_of(session)
        if session.words is not None:  # Orbax makes the folder for all processes only
            self._folder.mkdir(exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            create=session.words is None,
            multiprocessing_options=processes,
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=BARRIER_S,
                post_finalization_callback=self._write_checksums,
                # If a thread that creates them fails, Orbax's other threads wait for it
                # forever, and the process never ends.
                create_directories_asynchronously=False,
            ),
        )
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=options,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(multiprocessing_options=processes),
                "notes": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
                MODEL: ocp.StandardCheckpointHandler(multiprocessing_options=processes),
            },
        )
        self._unconfirmed: int | None = None
        self._tests: dict[int, dict[str, float]] = {}  # of checkpoints being written

    def _remove_leftovers(self) -> None:
        """Removes partial checkpoints that a killed run or a full disk left behind."""
        if self._session.is_main:
            for path in self._folder.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _write_checksums(self) -> None:
        """Orbax calls this when all files are written, before it renames their folder.

        If the run folder was moved meanwhile, Orbax has created it anew. `check` notices.
        """
        self._check()
        checksums.write(self._folder / f"{self._unconfirmed}{TEMPORARY}")

    def save(self, step: int, state: Any, notes: dict[str, Any], model: Any = None) -> bool:
        """Begins to write a checkpoint. Training may continue meanwhile.

        Args:
          notes: saved beside the state; `finite` says whether the losses are finite, and
            `tested` is the result of the center's test at this step, if it was tested.
          model: variables of the center, which `read_model` reads.

        Returns:
          Whether writing has begun, or the checkpoint exists. `wait` or `close` says
          whether it was written. If not, the checkpoints before it are still there.
        """
        if step == self._unconfirmed:
            return True
        self.wait()
        steps = self._manager.all_steps()
        if step in steps:
            return True
        self._unconfirmed = step
        needed = sum(x.nbytes for x in jax.tree.leaves((state, model)))
        newest = max(steps, default=step)
        if newest > step:  # Orbax would skip this one in silence
            obstacle = f"the one of step {newest} is later"
        else:
            obstacle = self._obstacle(needed)
        if obstacle:
            self._failed(obstacle)
            return False
        if self._session.words is not None:
            state, model = jax.tree.map(_on_host, (state, model))
        items = {"state": ocp.args.StandardSave(state), "notes": ocp.args.JsonSave(notes)}
        if model is not None:
            items[MODEL] = ocp.args.StandardSave(model)
        self._policy.known[step] = notes
        try:
            self._manager.save(step, args=ocp.args.Composite(**items))
        except FAILURES as error:
            self._failed(error)
            return False
        return True

    def add_test(self, step: int, tested: dict[str, float]) -> None:
        """Adds the result of a test to a checkpoint, which may still be being written."""
        if step == self._unconfirmed or step in steps_in(self._folder):
            self._policy.add_test(step, tested)
            self._tests[step] = tested
            self._write_tests()

    def _write_tests(self) -> None:
        """Writes the results of tests to those checkpoints that are complete."""
        for step in set(self._tests).intersection(steps_in(self._folder)):
            tested = self._tests.pop(step)
            path = self._folder / str(step) / TESTED
            if self._session.is_main and _tested(path) != tested:
                try:
                    self._check()
                    new = path.with_suffix(".new")
                    new.write_text(json.dumps(tested))
                    new.replace(path)
                except OSError as error:
                    reason = one_line(error)
                    self._warn(f"the test of step {step} was not saved: {reason}")

    def _obstacle(self, needed: int) -> str:
        """Returns why the main process cannot write `needed` bytes, or ''.

        With several processes, Orbax waits for minutes if no folder can be created.
        """
        found = self._gone()
        if self._session.is_main and not found:
            found = _obstacle(self._folder, needed)
        return self._session.agree(found)

    def _gone(self) -> str:
        """Returns why the run folder is gone, or '' if it is there."""
        try:
            self._check()
        except OSError as error:
            return f"{error.strerror}: {error.filename}"
        return ""

    def wait(self) -> bool:
        """Blocks until the current checkpoint is written. Returns whether it was."""
        try:
            self._manager.wait_until_finished()
        except FAILURES as error:
            self._failed(self._gone() or error)
            return False
        gone = "" if self._unconfirmed is None else self._gone()
        if gone:
            self._failed(gone)
            return False
        self._unconfirmed = None
        self._write_tests()
        return True

    def _failed(self, error: Exception | str) -> None:
        step = self._unconfirmed
        self._unconfirmed = None
        self._tests.clear()
        self._warn(f"the checkpoint of step {step} was not written: {one_line(error)}")
        self._remove_leftovers()
        with contextlib.suppress(*FAILURES):  # the folder may be gone
            self._manager.reload()  # Orbax has forgotten those that it was to remove

    def latest(self) -> int | None:
        """Returns the step of the latest checkpoint, or None."""
        return max(steps_in(self._folder), default=None)

    def latest_finite(self) -> int | None:
        """Returns the step of the latest checkpoint with finite losses, or None."""
        return self._policy.latest_finite(steps_in(self._folder))

    def best(self) -> Best | None:
        """Returns the checkpoint with the best test, or None if none was tested."""
        return self._policy.best(steps_in(self._folder))

    def restore_latest(self, like: Callable[[dict[str, Any]], Any]) -> Checkpoint | None:
        """Restores the latest checkpoint that can be read; None if there is none.

        An unreadable one (truncated, for example) is renamed to `unreadable-STEP`, and the
        one before it is tried.

        Args:
          like: see `read`.

        Raises:
          ValueError: no checkpoint can be read, or one holds another state than `like`.
            The latter changes no file.
        """
        for step in reversed(steps_in(self._folder)):
            try:
                found = read(self._folder, step, like, self._session)
            except Unreadable as error:
                aside = unused(self._folder / f"unreadable-{step}")
                self._warn(f"{error}; it is set aside as {aside.name}")
                self._set_aside(step, aside)
                continue
            if self._session.is_main and not checksums.are_there(self._folder / str(step)):
                self._warn(
                    f"the checkpoint of step {step} has no {checksums.CHECKSUMS}: it is of "
                    "an earlier version, or damaged, and was not checked"
                )
            return found
        if any(self._folder.glob("unreadable-*")):
            raise ValueError(f"{self._folder.parent} holds no checkpoint that can be read")
        return None

    def _set_aside(self, step: int, target: pathlib.Path) -> None:
        self._session.wait_for_all()
        if self._session.is_main:
            (self._folder / str(step)).rename(target)
        self._session.wait_for_all()
        self._manager.reload()

    def close(self) -> bool:
        """Closes the checkpoints. Returns whether the last one was written."""
        arrived = self.wait()
        try:
            self._manager.close()
        except FAILURES:  # for example, a file was in the way
            return False
        return arrived


def steps_in(folder: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, sorted."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def read(
    folder: pathlib.Path,
    step: int,
    like: Callable[[dict[str, Any]], Any],
    session: Session | None = None,
) -> Checkpoint:
    """Restores one checkpoint, and changes no file.

    Args:
      folder: the folder of the checkpoints.
      step: the step of the checkpoint.
      like: returns a state of the same shapes, given the notes. Arrays are restored with
        the placement of its arrays, and as host arrays where it has host arrays.
      session: the processes that restore together. Defaults to this process alone.

    Raises:
      Unreadable: the checkpoint is damaged.
      ValueError: it is not, but holds another state than `like`, or reading it failed.
      ValueError, RuntimeError: of XLA; another process was lost.
    """
    session = session or Session()
    path = folder.absolute() / str(step)
    damage = checksums.damage(path) if session.is_main else ""
    damage = session.agree(damage)
    if damage:
        raise Unreadable(step, damage)
    noted = notes_of(folder, step)
    try:
        wanted = jax.tree.map(_abstract, like(noted))
        if session.words is not None:
            wanted = jax.tree.map(_like_on_host, wanted)
    except (KeyError, TypeError, AttributeError) as error:
        raise Unreadable(step, f"its notes are incomplete ({error!r})") from error
    _silence()
    try:
        saved = _saved(path / "state")
        known = _as_saved(wanted, saved)
        difference = _first_difference(saved, known)
        state = None
        if not difference:
            processes = _processes_of(session)
            state = _restore(path / "state", wanted, known, processes)
    except Exception as error:  # Orbax and TensorStore raise all kinds
        if is_of_loss(error):
            raise
        reason = one_line(error)
        if not checksums.are_there(path):
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


def read_model(folder: pathlib.Path, step: int, worker: int | None = None) -> Any:
    """Reads a model from a checkpoint into host arrays. No device is used.

    Args:
      folder: the folder of the checkpoints.
      step: the step of the checkpoint.
      worker: a worker's number. Defaults to the center.

    Returns:
      The variables of a Flax module: 'params', and possibly batch statistics.

    Raises:
      Unreadable: the checkpoint is damaged.
    """
    path = folder.absolute() / str(step)
    damage = checksums.damage(path)
    if damage:
        raise Unreadable(step, damage)
    if worker is None and not (path / MODEL).exists():
        raise Unreadable(
            step,
            "it holds no center, because there was no time or no data for its batch "
            "statistics; worker='best' reads the best worker, and a resumed run saves one",
        )
    try:
        if worker is None:
            return _restore_part(path / MODEL, lambda name: True)
        found = _restore_part(path / "state", lambda name: name in ("params", "stats"))
    except Exception as error:  # Orbax and TensorStore raise all kinds
        raise Unreadable(step, one_line(error)) from error
    of_worker = jax.tree.map(lambda x: x[worker], found)
    return {"params": of_worker["params"], **of_worker.get("stats", {})}


def _restore_part(path: pathlib.Path, wanted: Callable[[str], bool]) -> Any:
    """Restores the members of a saved dict whose names are wanted, as host arrays."""
    saved = ocp.StandardCheckpointHandler().metadata(path)  # type: ignore  # takes any path
    tree = {name: x for name, x in saved.tree.items() if wanted(name)}
    like = jax.tree.map(lambda x: np.broadcast_to(np.zeros([], x.dtype), x.shape), tree)
    args = ocp.args.PyTreeRestore(
        item=like,
        restore_args=jax.tree.map(lambda x: ocp.RestoreArgs(restore_type=np.ndarray), like),
        partial_restore=True,
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path, args=args)


class _Alone:
    """The processes, for Orbax's handler of host arrays, which writes in process 0 alone.

    Here each process writes its own, and Orbax has no option for it.
    """

    @staticmethod
    def process_index() -> int:
        return 0


def _processes_of(session: Session) -> Any:
    """The processes that write and read together, as Orbax needs them."""
    if session.words is None:
        return ocp.options.MultiprocessingOptions()
    own = session.process_id
    handlers: Any = type_handlers
    handlers.multihost = _Alone
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process-{own}"
    )


def _on_host(x: Any) -> np.ndarray:
    """An array of this process as Orbax takes it where other processes do not write.

    Random keys are the integers that they hold.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _like_on_host(x: Any) -> np.ndarray:
    """An array like `_on_host`, which takes no memory."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return np.broadcast_to(np.zeros([], x.dtype), x.shape)


def _restore(path: pathlib.Path, wanted: Any, known: Any, processes: Any) -> Any:
    """Restores what the checkpoint knows. Counters that it does not know begin at 0."""
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=processes)
    checkpointer = ocp.Checkpointer(handler, multiprocessing_options=processes)
    if known is wanted:
        return checkpointer.restore(path, args=ocp.args.StandardRestore(wanted))
    found = _by_name(checkpointer.restore(path, args=ocp.args.StandardRestore(known)))

    def zeros(x):
        return jnp.zeros(x.shape, x.dtype, device=getattr(x, "sharding", None))

    def fill(path, x):
        return found[_name(path)] if _name(path) in found else zeros(x)

    return jax.tree_util.tree_map_with_path(fill, wanted)


def _as_saved(wanted: Any, saved: Any) -> Any:
    """The tree with the fields of the version that saved it.

    It lacks counters that were not saved, and has empty fields that there are no more. It
    is the tree itself if the fields are the same.
    """
    there = _by_name(saved)

    def is_new(name):
        return name.rpartition(".")[2] in NEW_COUNTERS and name not in there

    def known(tree: Any, saved: Any, name: str) -> Any:
        if isinstance(tree, dict):
            of_saved = saved if isinstance(saved, dict) else {}
            named = {key: f"{name}.{key}".lstrip(".") for key in tree}
            kept = {key: x for key, x in tree.items() if not is_new(named[key])}
            gone = {key: x for key, x in of_saved.items() if key not in tree}
            return {
                key: known(x, of_saved.get(key), named[key]) for key, x in kept.items()
            } | {key: x for key, x in gone.items() if not jax.tree.leaves(x)}
        if isinstance(tree, list | tuple) and tree:
            of_saved = saved if isinstance(saved, list | tuple) else ()
            pairs = itertools.zip_longest(tree, of_saved[: len(tree)])
            return [known(x, old, f"{name}.{i}") for i, (x, old) in enumerate(pairs)]
        return tree

    here = ocp.tree.serialize_tree(wanted, keep_empty_nodes=True)
    tree = known(here, saved, "")
    return wanted if jax.tree.structure(tree) == jax.tree.structure(here) else tree


def _saved(path: pathlib.Path) -> Any:
    """The shapes and dtypes of a saved state."""
    return ocp.StandardCheckpointHandler().metadata(path).tree  # type: ignore  # any path


def _abstract(leaf: Any) -> Any:
    """The leaf as Orbax needs it to restore one of the same kind."""
    as_it_is = isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct)
    return leaf if as_it_is else ocp.utils.to_shape_dtype_struct(leaf)


def _first_difference(saved: Any, wanted: Any) -> str:
    """Names the first array in which a saved state differs from `wanted`, or ''."""
    there = _by_name(saved)
    here = _by_name(ocp.tree.serialize_tree(wanted, keep_empty_nodes=True))
    for name in sorted(there.keys() | here.keys()):
        if name not in here:
            return f"{name} is in it, and not in this run"
        if name not in there:
            return f"{name} is not in it"
        a = there[name]
        b = here[name]
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):  # saved as integers
            same = a.shape[: len(b.shape)] == b.shape
        else:
            same = (a.shape, a.dtype) == (b.shape, b.dtype)
        if not same:
            return f"{name} is {_typed(a)} in it, and {_typed(b)} in this run"
    return ""


def _by_name(tree: Any) -> dict[str, Any]:
    return {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _typed(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def latest_notes(folder: pathlib.Path) -> dict[str, Any]:
    """The notes of the latest checkpoint in a folder that has some, or {}."""
    found = (notes_of(folder, step) for step in reversed(steps_in(folder)))
    return next(filter(None, found), {})


def notes_of(folder: pathlib.Path, step: int) -> dict[str, Any]:
    """The notes of a checkpoint, or {} if they cannot be read.

    Reads the file itself, because a checkpoint manager would initialize jax's devices.
    """
    if checksums.damage(folder / str(step), only=NOTES):
        return {}  # restoring the checkpoint will say what is wrong with it
    try:
        noted = json.loads((folder / str(step) / NOTES).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(noted, dict):
        return {}
    tested = _tested(folder / str(step) / TESTED)
    return noted if tested is None else noted | {"tested": tested}


def _tested(path: pathlib.Path) -> dict[str, float] | None:
    """The result of a test that was written beside a checkpoint, or None."""
    try:
        tested = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return tested if isinstance(tested, dict) else None


def _obstacle(folder: pathlib.Path, needed: int) -> str:
    """Returns why `needed` bytes cannot be written to a folder, or ''."""
    try:
        folder.mkdir(exist_ok=True)  # not its parents: the run folder must exist
        probe = folder / f"probe{TEMPORARY}"
        probe.mkdir(exist_ok=True)
        probe.rmdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{error.strerror}: {folder}"
    return "" if needed <= free else f"it takes {needed:,} bytes, and {free:,} are free"


def _silence() -> None:
    """Stops Orbax and TensorStore from printing errors that they also raise."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if getattr(sys.unraisablehook, "func", None) is not _show_unless_noise:
        sys.unraisablehook = functools.partial(_show_unless_noise, sys.unraisablehook)


def _show_unless_noise(show: Callable[[Any], object], unraisable: Any) -> None:
    """Drops TensorStore's calls to an event loop that closed at an earlier failure."""
    if str(unraisable.exc_value) != "Event loop is closed":
        show(unraisable)
