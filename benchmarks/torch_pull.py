"""A pull in PyTorch: one of the processes that `exchange_cost.py` compares with.

Reads a number of steps from each line of standard input, takes these steps, and writes the
seconds per step. A step is one of the optimizer with constant gradients. With `--pull` the
pull of `torch_lsgd.py` among all processes follows.
"""

import argparse

import torch
from torch import nn
from torch_lsgd import joined, pull, take_blocks


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--sizes", type=int, nargs="+", required=True, help="sizes of the leaves"
    )
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
