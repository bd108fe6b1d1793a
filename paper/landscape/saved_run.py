"""A run folder, read; nothing in it is changed."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp

from train import config as configuration
from train.cluster import devices
from train.config import WorkersConfig
from train.data.arrays import Dataset
from train.data.imagenet import ImageFolder
from train.data.transforms import Transforms
from train.metrics import log
from train.run import folder as run_folder
from train.run import resharding
from train.run.checkpoints import Checkpoint, latest_notes, notes_of, read, steps_in
from train.task.datasets import load_dataset
from train.task.experiment import Experiment
from train.task.state import TrainState


class SavedRun:
    """A run folder and one of its checkpoints, read.

    Args:
      folder: the run folder.
      step: of the checkpoint; None: the latest one that can be read.
      data_dir: where the data are now; None: where the run found them.
      warn: called with a line about a checkpoint that cannot be read.

    Attributes:
      folder, config, experiment: the run, and what it trained.
      data: the data set and its transforms.
      step, state: of the checkpoint.
      recent: the workers' recent losses noted beside it, float [W]; inf if not finite.

    Raises:
      ValueError: no run, no such checkpoint, none that can be read, data that are missing.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        step: int | None,
        data_dir: str | None,
        warn: Callable[[str], None],
    ):
        config = configuration.read(folder / run_folder.CONFIG)
        if config.data.name == "text":
            raise ValueError(f"{folder} is a run on text; only runs on images can be drawn")
        if config.method.is_asynchronous:
            raise ValueError(
                f"{folder} is a run of workers at their own pace, whose steps cannot be "
                "retraced; only runs in lock step can be drawn"
            )
        if data_dir is not None:
            data = dataclasses.replace(config.data, dir=data_dir)
            config = dataclasses.replace(config, data=data)
        self._checkpoints, self._began = folder / run_folder.CHECKPOINTS, config.workers
        config = dataclasses.replace(config, workers=self._grid(step))
        self.folder, self.config, self._warn = folder, config, warn
        # The devices first, those of the run: Orbax already asks for them.
        devices.provide(config.workers.nodes * config.workers.locals)
        self._steps = steps_in(self._checkpoints)
        if not self._steps:
            raise ValueError(f"{folder} holds no checkpoint yet")
        if step is not None and step not in self._steps:
            kept = ", ".join(map(str, self._steps))
            raise ValueError(f"`step` must be that of a checkpoint ({kept}), got {step=}")
        self.data: tuple[Dataset | ImageFolder, Transforms] = load_dataset(config)
        self.experiment = Experiment(config, self.data)
        # The shapes and shardings of a state, without its arrays.
        like = self.experiment.init()
        self._like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._latest() if step is None else self._restore(step)
        self.step, self.state = restored.step, restored.state
        recent = restored.notes["recent_losses"]
        self.recent = np.array([np.inf if x is None else x for x in recent])

    def _grid(self, step: int | None) -> WorkersConfig:
        """The workers of a checkpoint, or of the latest one."""
        folder = self._checkpoints
        notes = latest_notes(folder) if step is None else notes_of(folder, step)
        return resharding.grid(notes) or self._began

    def _restore(self, step: int) -> Checkpoint:
        return read(self._checkpoints, step, lambda notes: self._like)

    def _latest(self, before: float = np.inf) -> Checkpoint:
        """The latest checkpoint of these workers (before a step) that can be read."""
        for step in reversed([step for step in self._steps if step < before]):
            if self._grid(step) != self.config.workers:
                continue
            try:
                return self._restore(step)
            except ValueError as error:
                self._warn(str(error))
        raise ValueError(f"{self.folder} holds no checkpoint that can be read")

    def step_before(self) -> int:
        """The step of the checkpoint before this one; 0, the start of training, if none.

        This step, if training began with other workers: nothing can be retraced from there.
        """
        try:
            return self._latest(before=self.step).step
        except ValueError:
            return 0 if self.config.workers == self._began else self.step

    def state_at(self, step: int) -> TrainState:
        """The state at the step of a checkpoint, or at step 0."""
        return self._restore(step).state if step else self.experiment.init()

    def pace(self) -> float | None:
        """The run's last known steps per second."""
        try:
            events = log.read(self.folder).get("train", [])
        except (OSError, ValueError):
            return None
        known = [event.get("steps_per_second") for event in events]
        return next(filter(None, reversed(known)), None)
