"""The convolutions of CNN7 and ResNet20 alone, in JAX and in PyTorch, on this CPU.

    python benchmarks/convolutions.py [--torch PYTHON]

times the value and the gradients of the images and of the kernel for batches of 64. The
libraries take turns, each in its own process on all cores. The script prints a Markdown
table of milliseconds, the minima over all rounds: JAX and PyTorch. It shows how much of the
difference in `against_pytorch.py` is in the convolutions.
"""

import argparse
import json
import subprocess
import sys
import time

from usage import one_line_errors


BATCH, REPETITIONS = 64, 15
# Name: side of the images, channels in and out, side of the kernel, padding.
LAYERS = {
    "CNN7: 28 x 28 x 3, 64 of 5 x 5": (28, 3, 64, 5, 0),
    "CNN7: 12 x 12 x 64, 128 of 5 x 5": (12, 64, 128, 5, 0),
    "CNN7: 4 x 4 x 128, 64 of 3 x 3": (4, 128, 64, 3, 0),
    "ResNet20: 28 x 28 x 16, 16 of 3 x 3": (28, 16, 16, 3, 1),
    "ResNet20: 14 x 14 x 32, 32 of 3 x 3": (14, 32, 32, 3, 1),
    "ResNet20: 7 x 7 x 64, 64 of 3 x 3": (7, 64, 64, 3, 1),
}


def fastest(fn):
    """Returns the minimum in milliseconds over several calls, after a first one."""
    fn()
    times = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        fn()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def in_jax(side, inputs, outputs, size, padding):
    import jax
    import jax.numpy as jnp
    from jax import lax

    import lsgd_jax as lj
    from train.task import layers

    lj.emulate_devices(1)
    lj.tune_cpu()
    x = jnp.ones((BATCH, side, side, inputs))
    kernel = jnp.ones((size, size, inputs, outputs))

    def padded(x, kernel):
        borders, layout = [(padding, padding)] * 2, layers.LAYOUT
        return lax.conv_general_dilated(
            x, kernel, (1, 1), borders, dimension_numbers=layout
        )

    apply = padded if padding else layers.valid
    of_images = lambda x, g: jax.vjp(lambda x: apply(x, kernel), x)[1](g)[0]
    of_kernel = lambda k, g: jax.vjp(lambda k: apply(x, k), k)[1](g)[0]
    y = apply(x, kernel)
    calls = (apply, x, kernel), (of_images, x, y), (of_kernel, kernel, y)
    run = lambda fn, *args: lambda: jax.block_until_ready(fn(*args))
    return [fastest(run(jax.jit(fn), *args)) for fn, *args in calls]


def in_torch(side, inputs, outputs, size, padding):
    import torch
    from torch.nn import functional, grad

    x = torch.ones(BATCH, inputs, side, side)
    kernel = torch.ones(outputs, inputs, size, size)
    y = functional.conv2d(x, kernel, padding=padding)
    return [
        fastest(lambda: functional.conv2d(x, kernel, padding=padding)),
        fastest(lambda: grad.conv2d_input(x.shape, kernel, y, padding=padding)),
        fastest(lambda: grad.conv2d_weight(x, kernel.shape, y, padding=padding)),
    ]


def measured(python, library):
    """Returns the milliseconds of each layer, measured in another process."""
    command = [python, __file__, "--library", library]
    with one_line_errors():
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise ValueError(f"{python} cannot time {library}; its output is above")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch", default=sys.executable, metavar="PYTHON", help="one with PyTorch"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--library", choices=["jax", "torch"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.library:
        time_one = {"jax": in_jax, "torch": in_torch}[options.library]
        with one_line_errors():
            return print(json.dumps([time_one(*layer) for layer in LAYERS.values()]))
    found = [
        (measured(sys.executable, "jax"), measured(options.torch, "torch"))
        for _ in range(options.rounds)
    ]
    print("| convolution | value | gradient of the images | of the kernel |")
    print("| --- | --- | --- | --- |")
    for row, name in enumerate(LAYERS):
        cells = []
        for column in range(3):
            ours, theirs = (
                min(libraries[i][row][column] for libraries in found) for i in range(2)
            )
            cells.append(f"{ours:.2f} and {theirs:.2f}")
        print("| " + " | ".join((name, *cells)) + " |")


if __name__ == "__main__":
    main()
