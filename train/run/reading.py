"""Reading checkpoints: whole, of the right state, or not at all."""

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from train.run import checksums, noise


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
        noise.silence()
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
