"""A run folder, read without changing anything in it."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from train.cluster import devices
from train.config import WorkersConfig, settings
from train.metrics import log
from train.run import folder as run_folder
from train.run import resharding
from train.run.checkpoints import Checkpoint, latest_notes, notes_of, read, steps_in
from train.task.datasets import load_dataset
from train.task.experiment import Experiment
from train.task.state import TrainState


class SavedRun:
    """A run folder and one of its checkpoints.

    Args:
      folder: the run folder.
      step: the checkpoint's step. Defaults to the latest one that can be read.
      data_dir: the folder of the data. Defaults to the one that the run read.
      warn: called with a line about each checkpoint that cannot be read.

    Attributes:
      folder, config, experiment: the run.
      data: the data set and its transforms.
      step, state: the checkpoint's step and training state.
      recent: the workers' recent losses in its notes, float [W]; inf if not finite.

    Raises:
      ValueError: there is no run, no such checkpoint or none that can be read, or data are
        missing.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        step: int | None,
        data_dir: str | None,
        warn: Callable[[str], None],
    ):
        config = settings.read(folder / run_folder.CONFIG)
        if config.data.name == "text":
            raise ValueError(f"{folder} is a run on text; only runs on images can be drawn")
        if config.method.is_asynchronous:
            raise ValueError(
                f"{folder} is an asynchronous run, whose steps cannot be retraced; only "
                "runs in lock step can be drawn"
            )
        if data_dir is not None:
            data = dataclasses.replace(config.data, dir=data_dir)
            config = dataclasses.replace(config, data=data)
        self._checkpoints = folder / run_folder.CHECKPOINTS
        self._began = config.workers
        config = dataclasses.replace(config, workers=self._grid(step))
        self.folder = folder
        self.config = config
        self._warn = warn
        # Before Orbax, which initializes jax's devices.
        devices.provide(config.workers.nodes * config.workers.locals)
        self._steps = steps_in(self._checkpoints)
        if not self._steps:
            raise ValueError(f"{folder} holds no checkpoint yet")
        if step is not None and step not in self._steps:
            kept = ", ".join(map(str, self._steps))
            raise ValueError(
                f"`step` must be the step of a checkpoint ({kept}), got {step=}"
            )
        self.data: Any = load_dataset(config)  # images and transforms
        self.experiment = Experiment(config, self.data)
        # Shapes and shardings of a state, without its arrays.
        like = self.experiment.init()
        self._like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._latest() if step is None else self._restore(step)
        self.step = restored.step
        self.state = restored.state
        recent = restored.notes["recent_losses"]
        self.recent = np.array([np.inf if x is None else x for x in recent])

    def _grid(self, step: int | None) -> WorkersConfig:
        """Returns the grid of workers of a checkpoint, by default of the latest one."""
        folder = self._checkpoints
        notes = latest_notes(folder) if step is None else notes_of(folder, step)
        return resharding.grid(notes) or self._began

    def _restore(self, step: int) -> Checkpoint:
        return read(self._checkpoints, step, lambda notes: self._like)

    def _latest(self, before: float = np.inf) -> Checkpoint:
        """Restores the latest readable checkpoint of the same grid (before a step)."""
        for step in reversed([step for step in self._steps if step < before]):
            if self._grid(step) != self.config.workers:
                continue
            try:
                return self._restore(step)
            except ValueError as error:
                self._warn(str(error))
        raise ValueError(f"{self.folder} holds no checkpoint that can be read")

    def step_before(self) -> int:
        """Returns the step of the previous checkpoint, or 0 for the start of training.

        It is this checkpoint's own step if training began with another grid of workers,
        because nothing can be retraced then.
        """
        try:
            return self._latest(before=self.step).step
        except ValueError:
            return 0 if self.config.workers == self._began else self.step

    def state_at(self, step: int) -> TrainState:
        """Returns the state at the step of a checkpoint, or at step 0."""
        return self._restore(step).state if step else self.experiment.init()

    def pace(self) -> float | None:
        """Returns the last steps per second that the run logged, or None."""
        try:
            events = log.read(self.folder).get("train", [])
        except (OSError, ValueError):
            return None
        known = [event.get("steps_per_second") for event in events]
        return next(filter(None, reversed(known)), None)
