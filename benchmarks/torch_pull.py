"""A pull in PyTorch: one of the processes that `exchange_cost.py` is measured by.

Reads numbers of steps from its standard input, a line each, takes so many, and writes how
long a step took. A step is the optimizer's, with gradients that are always the same, and
with `--pull` the pull of `torch_lsgd.py` by all processes.
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch_lsgd import pull


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="of leaves")
    parser.add_argument("--base", choices=["adamw", "sgd"], required=True)
    parser.add_argument("--pull", action="store_true")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--store", required=True, help="a file to meet at")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    meet = f"file://{options.store}"
    dist.init_process_group("gloo", meet, rank=options.rank, world_size=options.workers)

    model = nn.ParameterList(torch.ones(size) for size in options.sizes)
    for leaf in model:
        leaf.grad = torch.full_like(leaf, 1e-3)
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[options.base]
    optimizer = optimizer(model.parameters(), lr=1e-3)
    for line in sys.stdin:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(int(line)):
            optimizer.step()
            if options.pull:
                pull(model, [float(options.rank)])
        dist.barrier()
        print((time.perf_counter() - began) / int(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
