"""What the input costs: training on real batches against one constant batch, in one run.

Command:   python benchmarks/input_speed.py
Hardware:  any CPU; 8 emulated devices, CNN7, 32 images per worker
Prints:    milliseconds per step of both, and the median of the ratios of their pace

Real batches are chosen by the sampler, looked up in the images on the devices, cropped,
mirrored and scaled inside the step; the constant batch is there, ready, from the beginning.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from side_by_side import Arm, made_up, ratios, summary

import lsgd_jax as lj
from train.data import transforms


class ConstantBatch(Arm):
    """Trains on the same finished images at every step."""

    def __init__(self, batch_size: int):
        real = transforms.cifar10()
        batch = np.asarray(real.test(made_up(batch_size).images))
        constant = dataclasses.replace(real, train=lambda key, images: jnp.asarray(batch))
        super().__init__(constant, batch_size=batch_size)
        self._batch = self.experiment.batch(0)

    def batch(self, step: int) -> jax.Array:
        """The labels of step 0."""
        return self._batch


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="pairs of blocks")
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker")
    options = parser.parse_args()
    lj.emulate_devices(8)
    lj.tune_cpu()
    real = Arm(transforms.cifar10(), batch_size=options.batch_size)
    constant = ConstantBatch(options.batch_size)
    print("a step with a constant batch, with real batches:")
    found = ratios(constant, real, options.rounds, steps=32)
    print(f"pace with real batches / with a constant one: {summary(found)}")


if __name__ == "__main__":
    main()
