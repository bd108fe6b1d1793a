"""What the pulls of LSGD cost: the same trainer with and without them, in one run.

Command:   python benchmarks/lsgd_overhead.py
Hardware:  any CPU; 8 emulated devices, CNN7, 32 images per worker
Prints:    milliseconds per step of both, and the median of the ratios

A block of 64 steps has four pulls in the node and one towards the leader of all.
"""

import argparse

from side_by_side import Arm, ratios, summary

import lsgd_jax as lj
from train.data import transforms
from train.task import methods


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="pairs of blocks")
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker")
    options = parser.parse_args()
    lj.emulate_devices(8)
    lj.tune_cpu()
    lsgd, without = (
        Arm(
            transforms.cifar10(),
            method=methods.make("lsgd", pull, pull, local_period=16, global_period=64),
            batch_size=options.batch_size,
        )
        for pull in (0.1, 0.0)
    )
    print("a step with pulls, without pulls:")
    found = ratios(lsgd, without, options.rounds, steps=64)
    print(f"lsgd / without pulls: {summary(found)}")


if __name__ == "__main__":
    main()
