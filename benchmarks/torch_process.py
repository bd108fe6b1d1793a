"""PyTorch's side of a comparison: one of the processes that `against_pytorch.Peers` starts.

Each line of standard input asks for a number of steps. The process takes these steps and
prints the seconds per step.

- train: LSGD, local SGD or DDP. The network, the batches, the optimizer and the pulls are
  those of `python -m train cifar10-cnn7` (or cifar10-resnet20) on random images. There is
  one process per worker. Every `--period` steps lsgd gathers all losses and broadcasts the
  leader's parameters; local-sgd averages the parameters. ddp is PyTorch's own mean of the
  gradients at every step.
- pull: the optimizer with constant gradients on leaves of these sizes and, with `--pull`,
  that pull at every step.
- convolution: the value of a convolution, or its gradient by the images or the kernel.
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


IMAGES = 2048
SIDE = 32
CROP = 28
PULL = 0.1
WINDOW = 10


class CNN7(nn.Module):
    """The 7-layer CNN of LSGD's experiments, for 28 x 28 crops."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 5)
        self.conv2 = nn.Conv2d(64, 128, 5)
        self.conv3 = nn.Conv2d(128, 64, 3)
        self.fc1 = nn.Linear(256, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        # The maximum comes first: the result is the same, and PyTorch is faster.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.conv3(x)).flatten(1)
        return self.fc2(F.dropout(self.fc1(x), 0.5, self.training))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without parameters (option A)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.new = outputs - inputs

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        x = x[:, :, :: self.stride, :: self.stride]
        half = self.new // 2
        return F.relu(F.pad(x, (0, 0, 0, 0, half, self.new - half)) + y)


class ResNet20(nn.Module):
    """The CIFAR ResNet with 20 layers, for 28 x 28 crops."""

    def __init__(self):
        super().__init__()
        widths = [16, *(16,) * 3, *(32,) * 3, *(64,) * 3]
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(
            *(BasicBlock(a, b, 1 if a == b else 2) for a, b in zip(widths, widths[1:]))
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


def augmented(images, generator):
    """Crops, flips and scales images at random: uint8 [B, 3, 32, 32] to [B, 3, 28, 28]."""
    batch = len(images)
    top, left = torch.randint(0, SIDE - CROP + 1, (2, batch, 1), generator=generator)
    rows = top + torch.arange(CROP)
    columns = left + torch.arange(CROP)
    flipped = torch.rand(batch, 1, generator=generator) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    which = torch.arange(batch)[:, None, None]
    crops = images[which, :, rows[:, :, None], columns[:, None, :]]
    return (crops.permute(0, 3, 1, 2).float() / 255 - 0.47) / 0.2


def pull(model, losses):
    """y <- y - λ (y - y of the leader), the worker with the lowest mean loss."""
    score = torch.tensor([sum(losses) / len(losses)])
    scores = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(scores, score)
    with torch.no_grad():
        own = nn.utils.parameters_to_vector(model.parameters())
        leader = own.clone()
        dist.broadcast(leader, src=int(torch.cat(scores).argmin()))
        nn.utils.vector_to_parameters(own.lerp(leader, PULL), model.parameters())


def average(model, losses):
    """y <- the mean of y over all workers."""
    del losses
    with torch.no_grad():
        total = nn.utils.parameters_to_vector(model.parameters())
        dist.all_reduce(total)
        nn.utils.vector_to_parameters(total / dist.get_world_size(), model.parameters())


EXCHANGES = {"lsgd": pull, "local-sgd": average, "ddp": None}


def make_training(options):
    """Returns a function that takes a training step."""
    model = {"cnn7": CNN7, "resnet20": ResNet20}[options.model]()
    exchange = EXCHANGES[options.method]
    if exchange is None:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(options.rank)
    shape = (IMAGES, 3, SIDE, SIDE)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (IMAGES,), generator=generator)
    losses = []
    taken = 0

    def step():
        nonlocal losses, taken
        chosen = torch.randint(0, IMAGES, (options.batch_size,), generator=generator)
        logits = model(augmented(images[chosen], generator))
        loss = F.cross_entropy(logits, labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses = [*losses[1 - WINDOW :], loss.item()]
        taken += 1
        if exchange and taken % options.period == 0:
            exchange(model, losses)

    return step


def make_pull(options):
    """Returns a function that takes a step of the optimizer and, if asked, pulls."""
    model = nn.ParameterList(torch.ones(size) for size in options.sizes)
    for leaf in model:
        leaf.grad = torch.full_like(leaf, 1e-3)
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[options.base]
    optimizer = optimizer(model.parameters(), lr=1e-3)

    def step():
        optimizer.step()
        if options.pull:
            pull(model, [float(options.rank)])

    return step


def make_convolution(options):
    """Returns a function that computes a convolution or one of its gradients."""
    side, inputs, outputs, size, padding = options.layer
    x = torch.ones(options.batch_size, inputs, side, side)
    kernel = torch.ones(outputs, inputs, size, size)
    y = F.conv2d(x, kernel, padding=padding)
    return {
        "value": lambda: F.conv2d(x, kernel, padding=padding),
        "images": lambda: nn.grad.conv2d_input(x.shape, kernel, y, padding=padding),
        "kernel": lambda: nn.grad.conv2d_weight(x, kernel.shape, y, padding=padding),
    }[options.of]


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("--threads", "--rank", "--workers"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--store", required=True, help="file of the rendezvous")
    kinds = parser.add_subparsers(dest="kind", required=True)
    train, pulling, convolution = map(kinds.add_parser, KINDS)
    train.add_argument("--model", choices=["cnn7", "resnet20"], required=True)
    train.add_argument("--method", choices=list(EXCHANGES), default="lsgd")
    train.add_argument("--period", type=int, default=64)
    train.add_argument("--batch-size", type=int, required=True)
    pulling.add_argument("--sizes", type=int, nargs="+", required=True)
    pulling.add_argument("--base", choices=["adamw", "sgd"], required=True)
    pulling.add_argument("--pull", action="store_true")
    convolution.add_argument("--layer", type=int, nargs=5, required=True)
    convolution.add_argument("--batch-size", type=int, required=True)
    convolution.add_argument("--of", choices=["value", "images", "kernel"], required=True)
    return parser.parse_args()


KINDS = {"train": make_training, "pull": make_pull, "convolution": make_convolution}


def main():
    options = parse()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    meet = f"file://{options.store}"
    dist.init_process_group("gloo", meet, rank=options.rank, world_size=options.workers)
    step = KINDS[options.kind](options)
    for line in sys.stdin:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        dist.barrier()
        print((time.perf_counter() - began) / int(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
