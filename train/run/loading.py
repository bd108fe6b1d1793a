"""Loads what a run has trained, in any program: `train.load(RUN)`."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
from jax import Array
from jax.typing import ArrayLike

import lsgd_jax as lj
from train.config import settings
from train.config.schema import Config
from train.data.translation import Subwords
from train.run.checkpoints import BestAndFinite, Unreadable, notes_of, read_model, steps_in
from train.run.folder import CHECKPOINTS, CONFIG, check_is_run
from train.task import datasets, models
from train.task.datasets import VOCABULARIES, Vocabulary
from train.task.images import CLASSES
from train.task.text import VOCABULARY
from train.task.translation import translated


Which = Literal["best", "last"]


class Loaded(NamedTuple):
    """A trained model.

    Attributes:
      config: the configuration of the run.
      model: the network, a Flax module.
      variables: its variables as host arrays: 'params', and possibly batch statistics.
      vocabulary: the tokens of a text, or of sentences; None for images.
      step: the step of the checkpoint.
      tested: the result of the center's test at this step, or None if it was not tested.
      outputs: the number of classes or tokens.
      classes: the names of the classes of images; None for other data and earlier runs.
      shape: of an input, for arrays; None for other data.
    """

    config: Config
    model: nn.Module
    variables: dict[str, Any]
    vocabulary: Vocabulary | None
    step: int
    tested: dict[str, float] | None
    outputs: int
    classes: list[str] | None = None
    shape: tuple[int, ...] | None = None

    def logits(self, inputs: ArrayLike | tuple[ArrayLike, ArrayLike]) -> Array:
        """Applies the model as in a test.

        Args:
          inputs: images of the data set, uint8 [B, H, W, C], arrays as in its files, or
            token ids, int [B, T]. A translation takes a pair: ids of sentences [B, S] and
            of translations [B, T].

        Returns:
          float32 [B, classes], or [B, T, tokens].
        """
        if self.vocabulary is not None:
            given = inputs if isinstance(inputs, tuple) else (inputs,)
            return self.model.apply(self.variables, *given)  # type: ignore
        images = datasets.transforms_of(self.config).test(inputs)  # type: ignore
        return self.model.apply(self.variables, images, False)  # type: ignore

    def translate(self, sentences: Sequence[str], beam: int = 1) -> list[str]:
        """Translates sentences; see `train.task.translation.translated`.

        Raises:
          ValueError: it is no model of translation.
        """
        if not isinstance(self.vocabulary, Subwords):
            data = self.config.data.name
            raise ValueError(f"`translate` needs a run on translation, not on {data}")
        lj.checks.check_positive_int("beam", beam)
        return translated(self.model, self.variables, self.vocabulary, sentences, beam)


def load(
    run: str | os.PathLike,
    which: Which | int = "best",
    worker: Literal["best"] | int | None = None,
) -> Loaded:
    """Loads a model from a run folder. The data and the run's devices are not needed.

    Args:
      run: the run folder.
      which: the checkpoint with the best test of the center (the last one if none was
        tested), the last one, or the one of a step.
      worker: the number of a worker, or the one with the lowest recent losses. Defaults to
        the center. The center has the batch statistics with which it was tested, a worker
        has its own.

    Raises:
      ValueError: the folder is no run, or the checkpoint is missing or damaged.
    """
    folder = pathlib.Path(run)
    check_is_run(folder)
    config = settings.read(folder / CONFIG)
    checkpoints = folder / CHECKPOINTS
    step = _step(folder, which)
    notes = notes_of(checkpoints, step)
    if notes and "sizes" not in notes:
        raise ValueError(
            f"the checkpoint of step {step} in {folder} holds no model, because an earlier "
            "version wrote it; resume the run for a step to save one"
        )
    variables = read_model(checkpoints, step, _number(worker, notes))
    if not notes:
        raise Unreadable(step, "its notes are incomplete")
    if config.data.name in VOCABULARIES:
        vocabulary = _vocabulary(folder, config)
        outputs = len(vocabulary)
    else:
        vocabulary = None
        outputs = notes["sizes"]["classes"]
    classes, shape = _noted(folder)
    return Loaded(
        config=config,
        model=models.make(config, outputs),
        variables=variables,
        vocabulary=vocabulary,
        step=step,
        tested=notes["tested"],
        outputs=outputs,
        classes=classes,
        shape=shape,
    )


def _step(folder: pathlib.Path, which: Which | int) -> int:
    """The step of the checkpoint to load."""
    steps = steps_in(folder / CHECKPOINTS)
    if not steps:
        raise ValueError(f"{folder} holds no checkpoint yet")
    if isinstance(which, int):
        if which not in steps:
            kept = ", ".join(map(str, steps))
            raise ValueError(f"`which` must be best, last or one of {kept}, got {which=}")
        return which
    if which not in ("best", "last"):
        raise ValueError(f"`which` must be best, last or a step, got {which=}")
    best = BestAndFinite(folder / CHECKPOINTS).best(steps) if which == "best" else None
    return steps[-1] if best is None else best.step


def _number(worker: Literal["best"] | int | None, notes: Mapping[str, Any]) -> int | None:
    """The number of the worker to load, or None for the center."""
    if worker is None or not notes:  # reading the model says what is damaged
        return None
    grid = notes["workers"]
    count = grid["nodes"] * grid["locals"]
    if worker == "best":
        return notes["best_worker"]
    if worker not in range(count):
        raise ValueError(f"`worker` must be best or in [0, {count}), got {worker=}")
    return worker


def _noted(folder: pathlib.Path) -> tuple[list[str] | None, tuple[int, ...] | None]:
    """The classes and the shape of images that a run has noted, as far as it has."""
    path = folder / CLASSES
    if not path.exists():
        return None, None
    try:
        noted = json.loads(path.read_text())
        shape = noted.get("shape")
        return noted["classes"], None if shape is None else tuple(shape)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _vocabulary(folder: pathlib.Path, config: Config) -> Vocabulary:
    try:
        kept = (folder / VOCABULARY).read_text()
        return VOCABULARIES[config.data.name].from_json(kept)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / VOCABULARY} cannot be read: {error}") from error
