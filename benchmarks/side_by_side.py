"""Times steps in alternating blocks, because a shared machine's pace drifts.

An arm of a comparison has a method `seconds_per_step(steps)`, which runs a block of steps.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from train.cluster.session import Session
from train.config import Config
from train.data import transforms
from train.data.arrays import Dataset, Images
from train.task.experiment import Experiment


class Step:
    """An arm: a function (*state, *given) -> state, and the state, which arms may share."""

    def __init__(self, step: Callable[..., Any], state: list[Any], *given: Any):
        self._step = step
        self._state = state
        self._given = given

    def seconds_per_step(self, steps: int) -> float:
        """Runs a block of steps and returns the seconds per step."""
        jax.block_until_ready(self._state)
        began = time.perf_counter()
        for _ in range(steps):
            self._state[:] = self._step(*self._state, *self._given)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - began) / steps


class Trainer(Step):
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


def in_turns(
    arms: Mapping[str, Any], rounds: int, steps: int | Mapping[str, int]
) -> dict[str, list[float]]:
    """Returns the milliseconds per step of each arm in each round.

    A block of steps before the first round compiles. `steps` may differ between the arms.
    """
    blocks = dict.fromkeys(arms, steps) if isinstance(steps, int) else steps
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 1):
        for name, arm in arms.items():
            times[name].append(1e3 * arm.seconds_per_step(blocks[name]))
    return {name: seen[1:] for name, seen in times.items()}


def ratios(first: list[float], second: list[float]) -> list[float]:
    """Returns the ratio in each round."""
    return [a / b for a, b in zip(first, second)]
