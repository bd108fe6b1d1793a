"""The trainer's side of a comparison in processes: one of those that `Peers` starts.

Each line of standard input asks for a number of steps. The process takes these steps and
prints the seconds per step. There is one process with one device per worker, as on
PyTorch's side (`torch_process.py`), and `--threads` threads of XLA in each.
"""

import argparse
import os
import sys
from importlib import import_module

import jax
from jax.experimental import multihost_utils
from side_by_side import on_random_images, one_device

import lsgd_jax as lj
from train.config import WorkersConfig
from train.process.output import python_only


def parse():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("--threads", "--rank", "--workers", "--port", "--batch-size"):
        words.add_argument(name, type=int, required=True)
    words.add_argument("--model", choices=["cnn7", "resnet20"], required=True)
    return words.parse_args()


def main():
    options = parse()
    sys.stdout = python_only(sys.stdout)  # for the answers alone, and gloo prints there
    os.environ["PJRT_NPROC"] = str(options.threads)
    jax.config.update("jax_platforms", "cpu")
    lj.tune_cpu()
    one_device(options.port, options.workers, options.rank)
    config = import_module(f"configs.cifar10_{options.model}").CONFIG
    grid = WorkersConfig(nodes=1, locals=options.workers)
    ours = on_random_images(config, workers=grid, batch_size=options.batch_size)
    for line in sys.stdin:
        multihost_utils.sync_global_devices("begin")
        print(ours.seconds_per_step(int(line)), flush=True)
        multihost_utils.sync_global_devices("end")


if __name__ == "__main__":
    main()
