"""A pull in PyTorch: one of the processes that `exchange_cost.py` is measured by.

Reads numbers of steps from its standard input, a line each, takes so many, and writes how
long a step took. A step is the optimizer's, with gradients that are always the same, and
with `--pull` the pull of `torch_lsgd.py` by all processes.
"""

import argparse

import torch
from torch import nn
from torch_lsgd import joined, pull, take_blocks


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="of leaves")
    parser.add_argument("--base", choices=["adamw", "sgd"], required=True)
    parser.add_argument("--pull", action="store_true")
    options = joined(parser)

    model = nn.ParameterList(torch.ones(size) for size in options.sizes)
    for leaf in model:
        leaf.grad = torch.full_like(leaf, 1e-3)
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[options.base]
    optimizer = optimizer(model.parameters(), lr=1e-3)

    def step():
        optimizer.step()
        if options.pull:
            pull(model, [float(options.rank)])

    take_blocks(step)


if __name__ == "__main__":
    main()
