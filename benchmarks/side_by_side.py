"""Trainers on random images, and processes of one device each, for benchmarks."""

import dataclasses
from typing import Any

import jax
import numpy as np

from train.accept.turns import TimedStep
from train.cluster.session import Session
from train.config import Config
from train.data import transforms
from train.data.arrays import Dataset, Images
from train.task.experiment import Experiment


class Trainer(TimedStep):
    """An arm: an experiment and its state."""

    def __init__(self, experiment: Experiment):
        count = iter(range(10**9))

        def step(state: Any) -> list[Any]:
            return [experiment.advance(state, next(count))[0]]

        super().__init__(step, [experiment.init()])


def on_random_images(
    config: Config, session: Session | None = None, **changes: Any
) -> Trainer:
    """Returns the trainer of a configuration on random images of CIFAR-10's form."""
    dataset = Dataset(train=made_up(2048), test=made_up(8), num_classes=10)
    config = dataclasses.replace(config, **changes)
    return Trainer(Experiment(config, (dataset, transforms.cifar10()), session=session))


def made_up(count: int) -> Images:
    """Returns random images of CIFAR-10's form."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(count, 32, 32, 3), dtype=np.uint8)
    return Images(images, rng.integers(0, 10, size=count, dtype=np.int32))


def one_device(port: int, processes: int, process: int) -> None:
    """Joins the processes of this machine, each with one device."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, [process])


def steps_of(method: Any, least: int) -> int:
    """Returns the steps of a block: the longest period of a method, or `least`."""
    names = "period", "local_period", "global_period"
    return max(least, *(getattr(method, name, 1) for name in names))
