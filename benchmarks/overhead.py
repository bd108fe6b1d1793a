"""The cost of pulls and of the input: the trainer with and without each, in one run.

Command:   python benchmarks/overhead.py [pulls] [input]
Hardware:  any CPU; 8 emulated devices, CNN7, 32 images per worker
Prints:    milliseconds per step of both arms, and the median of their ratios

- pulls: LSGD beside the same trainer without pulls. A block of 64 steps has four pulls in
  the node and one towards the leader of all.
- input: training on real batches beside one constant batch. Real batches are sampled,
  looked up in the images on the devices, cropped, mirrored and scaled inside the step.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from side_by_side import Arm, made_up, ratios, summary

import lsgd_jax as lj
from train.data import transforms
from train.task import methods


class ConstantBatch(Arm):
    """Trains on the same preprocessed images at every step."""

    def __init__(self, batch_size: int):
        real = transforms.cifar10()
        batch = np.asarray(real.test(made_up(batch_size).images))
        constant = real._replace(train=lambda key, images: jnp.asarray(batch))
        super().__init__(constant, batch_size=batch_size)
        self._batch = self.experiment.batch(0)

    def batch(self, step: int) -> jax.Array:
        """Returns the labels of step 0."""
        return self._batch


def compare_pulls(rounds: int, batch_size: int) -> None:
    """Times steps with pulls and without."""
    lsgd, without = (
        Arm(
            transforms.cifar10(),
            method=methods.make("lsgd", pull, pull, local_period=16, global_period=64),
            batch_size=batch_size,
        )
        for pull in (0.1, 0.0)
    )
    print("a step with pulls, without pulls:")
    found = ratios(lsgd, without, rounds, steps=64)
    print(f"lsgd / without pulls: {summary(found)}")


def compare_input(rounds: int, batch_size: int) -> None:
    """Times steps with a constant batch and with real batches."""
    real = Arm(transforms.cifar10(), batch_size=batch_size)
    constant = ConstantBatch(batch_size)
    print("a step with a constant batch, with real batches:")
    found = ratios(constant, real, rounds, steps=32)
    print(f"pace with real batches / with a constant one: {summary(found)}")


PARTS = {"pulls": compare_pulls, "input": compare_input}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = "|".join(PARTS)
    parser.add_argument("parts", nargs="*", metavar=names, help="defaults to both")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of blocks")
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker")
    options = parser.parse_args()
    parts = options.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: must be one of {', '.join(PARTS)}")
    lj.emulate_devices(8)
    lj.tune_cpu()
    for part in parts:
        PARTS[part](options.rounds, options.batch_size)


if __name__ == "__main__":
    main()
