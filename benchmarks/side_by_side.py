"""Times trainers in alternating blocks of steps, because a shared machine's pace drifts."""

import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np

from configs.cifar10_cnn7 import CONFIG
from train.cluster.session import Session
from train.config import Config, WorkersConfig
from train.data.arrays import Dataset, Images
from train.data.transforms import Transforms
from train.task.experiment import Experiment


CNN7_OF_8 = dataclasses.replace(CONFIG, workers=WorkersConfig(nodes=2, locals=4))


def made_up(count: int) -> Images:
    """Returns random images of CIFAR-10's form."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(count, 32, 32, 3), dtype=np.uint8)
    return Images(images, rng.integers(0, 10, size=count, dtype=np.int32))


class Trainer:
    """An experiment and its state."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self._state, self._step = experiment.init(), 0

    def batch(self, step: int) -> jax.Array:
        """Returns the batch of a step."""
        return self.experiment.batch(step)

    def seconds_per_step(self, steps: int) -> float:
        """Runs a block of steps and returns the seconds per step."""
        experiment = self.experiment
        began = time.perf_counter()
        for _ in range(steps):
            batch = self.batch(self._step)
            self._state, _ = experiment.step(self._state, experiment.data, batch)
            self._step += 1
        jax.block_until_ready(self._state)
        return (time.perf_counter() - began) / steps


class Arm(Trainer):
    """A trainer on random images."""

    def __init__(
        self,
        transforms: Transforms,
        config: Config = CNN7_OF_8,
        session: Session | None = None,
        **changes: Any,
    ):
        config = dataclasses.replace(config, **changes)
        dataset = Dataset(train=made_up(2048), test=made_up(8), num_classes=10)
        super().__init__(Experiment(config, (dataset, transforms), session=session))


def longest_period(method: Any) -> int:
    """Returns the longest period in a method's options."""
    names = "period", "local_period", "global_period"
    return max(getattr(method, name, 1) for name in names)


def ratios(first: Any, second: Any, rounds: int, steps: int) -> list[float]:
    """Returns the first's seconds per step over the second's, for pairs of blocks."""
    found = []
    for arm in (first, second):
        arm.seconds_per_step(steps)  # compiles
    for turn in range(rounds):
        order = (first, second) if turn % 2 else (second, first)
        took = {arm: arm.seconds_per_step(steps) for arm in order}
        found.append(took[first] / took[second])
        print(f"{1e3 * took[first]:.1f} ms, {1e3 * took[second]:.1f} ms", flush=True)
    return found


def summary(found: list[float]) -> str:
    """Formats the median and all ratios."""
    each = ", ".join(f"{ratio:.3f}" for ratio in found)
    return f"median {statistics.median(found):.3f} of {each}"
