"""What the pulls of LSGD cost: the same trainer with and without them, in one run.

Command:   python benchmarks/lsgd_overhead.py
Hardware:  any CPU; 8 emulated devices, CNN7, 32 images per worker
Prints:    milliseconds per step of both, and the median of the ratios

Blocks of 64 steps (four pulls in the node, one towards the leader of all) alternate, since
the pace of a shared machine drifts; every ratio is of two blocks side by side.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import numpy as np

import lsgd_jax as lj
from configs.cifar10_cnn7 import CONFIG
from train.config import WorkersConfig
from train.data import transforms
from train.data.arrays import Dataset, Images
from train.experiment import Experiment
from train.methods import Lsgd


BLOCK = 64


def made_up(count: int) -> Images:
    """Random images of CIFAR-10's form."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(count, 32, 32, 3), dtype=np.uint8)
    return Images(images, rng.integers(0, 10, size=count, dtype=np.int32))


class Arm:
    """One of the two trainers, with its state."""

    def __init__(self, pull: float, batch_size: int):
        config = dataclasses.replace(
            CONFIG,
            workers=WorkersConfig(nodes=2, locals=4),
            method=Lsgd(pull, pull, local_period=16, global_period=64),
            batch_size=batch_size,
        )
        dataset = Dataset(train=made_up(2048), test=made_up(8), num_classes=10)
        self._experiment = Experiment(config, (dataset, transforms.cifar10()))
        self._state, self._step = self._experiment.init(), 0

    def seconds_per_step(self) -> float:
        """Runs a block of steps."""
        experiment = self._experiment
        began = time.perf_counter()
        for _ in range(BLOCK):
            rows = experiment.rows(self._step)
            self._state, _ = experiment.step(self._state, experiment.data, rows)
            self._step += 1
        jax.block_until_ready(self._state)
        return (time.perf_counter() - began) / BLOCK


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="pairs of blocks")
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker")
    options = parser.parse_args()
    lj.emulate_devices(8)
    batch = options.batch_size
    arms = {"without pulls": Arm(0.0, batch), "lsgd": Arm(0.1, batch)}
    for arm in arms.values():
        arm.seconds_per_step()  # compiles
    ratios = []
    for turn in range(options.rounds):
        order = list(arms.items())[:: 1 if turn % 2 else -1]
        took = {name: arm.seconds_per_step() for name, arm in order}
        ratios.append(took["lsgd"] / took["without pulls"])
        print(", ".join(f"{name} {1e3 * took[name]:.1f} ms" for name in arms), flush=True)
    shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"lsgd / without pulls: median {statistics.median(ratios):.3f} of {shown}")


if __name__ == "__main__":
    main()
