"""Images per second of LSGD on one CPU: the trainer beside PyTorch.

    pip install "lsgd_jax[train,benchmark]"
    python benchmarks/against_pytorch.py [--models cnn7 resnet20] [--rounds 5]

Four workers of 64 images each are trained by the trainer, with 4 emulated devices in one
process, and by four processes of `torch_lsgd.py`, joined by gloo. Both train the same
network on random images of CIFAR-10's form with the same crops, flips and pulls, in
alternating blocks of steps. The script prints a Markdown table of images per second
(median and best) and the median ratio of neighboring blocks. `--torch PYTHON` uses the
PyTorch of another Python.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
from importlib import import_module

from side_by_side import Arm, ratios
from torch_peers import Peers

import lsgd_jax as lj
from train.config import WorkersConfig
from train.data import transforms


WORKERS, BATCH = 4, 64


class Recorded:
    """A trainer that records the seconds per step of its blocks."""

    def __init__(self, trainer):
        self.trainer, self.seconds = trainer, []

    def seconds_per_step(self, steps):
        self.seconds.append(self.trainer.seconds_per_step(steps))
        return self.seconds[-1]

    @property
    def rates(self):
        """Images per second of each block except the first, which compiles."""
        return [WORKERS * BATCH / seconds for seconds in self.seconds[1:]]


def measure(model, options, folder):
    """Returns images per second of the trainer and of PyTorch, and the ratios."""
    config = import_module(f"configs.cifar10_{model}").CONFIG
    workers = WorkersConfig(nodes=1, locals=WORKERS)
    arm = Arm(transforms.cifar10(), config, workers=workers, batch_size=BATCH)
    threads = max(1, len(os.sched_getaffinity(0)) // WORKERS)
    peers = Peers(
        options.torch, folder, WORKERS, model=model, batch_size=BATCH, threads=threads
    )
    ours, theirs = Recorded(arm), Recorded(peers)
    try:
        # PyTorch's seconds over ours: how many times as fast the trainer is.
        found = ratios(theirs, ours, options.rounds, options.steps)
    finally:
        peers.end()
    return ours.rates, theirs.rates, found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["cnn7", "resnet20"])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=32, help="steps of a block")
    parser.add_argument(
        "--torch", default=sys.executable, metavar="PYTHON", help="one with PyTorch"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, help="write the measurements to this file"
    )
    options = parser.parse_args()
    lj.emulate_devices(WORKERS)
    lj.tune_cpu()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            ours, theirs, found = measure(model, options, folder)
            rows.append(dict(model=model, lsgd_jax=ours, pytorch=theirs, ratios=found))
    print("| network | lsgd_jax, images/s | PyTorch, images/s | ratio |")
    print("| --- | --- | --- | --- |")
    cell = lambda rates: f"{statistics.median(rates):.0f} ({max(rates):.0f})"
    for row in rows:
        each = cell(row["lsgd_jax"]), cell(row["pytorch"])
        ratio = f"{statistics.median(row['ratios']):.2f}"
        print("| " + " | ".join((row["model"], *each, ratio)) + " |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
