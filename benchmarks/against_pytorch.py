"""Speed on one CPU beside PyTorch: training with LSGD, or single convolutions.

    pip install -e ".[train,benchmark]"
    python benchmarks/against_pytorch.py [--models cnn7 resnet20] [--rounds 5]
    python benchmarks/against_pytorch.py --convolutions --rounds 15

Four workers of 64 images each are trained by the trainer, with 4 emulated devices in one
process and in four processes (`trainer_process.py`), and by four processes of PyTorch
(`torch_process.py`), joined by gloo. All train the same network on random images of
CIFAR-10's form with the same crops, flips and pulls, in alternating blocks of steps. The
script prints a Markdown table of images per second (median and best) and the median ratio
of neighboring blocks. `--torch PYTHON` uses the PyTorch of another Python.

`--convolutions` shows how much of the difference is in the convolutions of the networks. It
times their values and the gradients of the images and of the kernel for batches of 64, on
all cores in turns, and prints the least milliseconds: JAX and PyTorch.
"""

import contextlib
import functools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from side_by_side import on_random_images
from usage import (
    add_torch,
    head,
    median,
    one_line_errors,
    parser,
    row,
)

import lsgd_jax as lj
from train.accept.turns import TimedStep, in_turns, ratios
from train.config import WorkersConfig
from train.launch import free_port
from train.task import layers


WORKERS = 4
BATCH = 64
BLOCK = 5  # convolutions
CORES = len(os.sched_getaffinity(0))
# Name: side of the images, channels in and out, side of the kernel, padding.
LAYERS = {
    "CNN7: 28 x 28 x 3, 64 of 5 x 5": (28, 3, 64, 5, 0),
    "CNN7: 12 x 12 x 64, 128 of 5 x 5": (12, 64, 128, 5, 0),
    "CNN7: 4 x 4 x 128, 64 of 3 x 3": (4, 128, 64, 3, 0),
    "ResNet20: 28 x 28 x 16, 16 of 3 x 3": (28, 16, 16, 3, 1),
    "ResNet20: 14 x 14 x 32, 32 of 3 x 3": (14, 32, 32, 3, 1),
    "ResNet20: 7 x 7 x 64, 64 of 3 x 3": (7, 64, 64, 3, 1),
}


def here(i: int, command: list[str], **options: Any) -> subprocess.Popen:
    """Starts the command of worker i on this machine."""
    del i
    return subprocess.Popen(command, **options)


class Processes:
    """An arm: processes that wait for their turn, in a context.

    Args:
      script: what they run, a file beside this one.
      python: its interpreter.
      workers: number of processes.
      threads: threads of each.
      start: starts the command of a worker.
      words: words behind those of the processes.
      **settings: options of the script; a list stands for several values, True for none.
    """

    def __init__(
        self,
        script: str,
        python: str,
        workers: int,
        threads: int,
        start: Callable[..., subprocess.Popen] = here,
        words: Sequence[str] = (),
        **settings: Any,
    ):
        program = pathlib.Path(__file__).with_name(script)
        command = [python, str(program), f"--workers={workers}", f"--threads={threads}"]
        words = list(words)
        for name, value in settings.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += ["--" + name.replace("_", "-"), *map(str, values)]
        # The workers' threads do not depend on the environment of this process.
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with one_line_errors():
            self._processes = [
                start(rank, [*command, f"--rank={rank}", *words], env=env, **pipes)
                for rank in range(workers)
            ]

    def seconds_per_step(self, steps: int) -> float:
        """Runs a block of steps and returns the seconds per step."""
        answers = []
        with contextlib.suppress(BrokenPipeError):
            for process in self._processes:
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
            answers = [process.stdout.readline() for process in self._processes]
        if not answers or not all(answers):
            print("error: a process ended; see its output", file=sys.stderr)
            sys.exit(2)
        return max(map(float, answers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            process.wait(60)


class Peers(Processes):
    """An arm: processes of PyTorch.

    Args:
      kind: 'train', 'pull' or 'convolution', see `torch_process.py`.
      python, workers, threads, start, **settings: see `Processes`.
    """

    def __init__(self, python: str, kind: str, workers: int, threads: int, **settings: Any):
        self._meeting = tempfile.TemporaryDirectory()
        words = [f"--store={self._meeting.name}/store", kind]
        super().__init__(
            "torch_process.py", python, workers, threads, words=words, **settings
        )

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._meeting.cleanup()


def train(options: Any) -> None:
    """Prints the images per second of each network."""
    lj.emulate_devices(WORKERS)
    threads = max(1, CORES // WORKERS)
    head("network", "devices", "processes", "PyTorch", "ratios to PyTorch")
    for model in options.models:
        config = import_module(f"configs.cifar10_{model}").CONFIG
        grid = WorkersConfig(nodes=1, locals=WORKERS)
        settings = {"model": model, "batch_size": BATCH}
        ours = functools.partial(Processes, "trainer_process.py", sys.executable)
        with (
            ours(WORKERS, threads, port=free_port(), **settings) as processes,
            Peers(options.torch, "train", WORKERS, threads, **settings) as theirs,
        ):
            devices = on_random_images(config, workers=grid, batch_size=BATCH)
            arms = {"devices": devices, "processes": processes, "PyTorch": theirs}
            times = in_turns(arms, options.rounds, options.steps)
        rates = {k: [1e3 * WORKERS * BATCH / x for x in ms] for k, ms in times.items()}
        # PyTorch's seconds over ours: how many times as fast the trainer is.
        faster = (
            ratios(times["PyTorch"], times[form]) for form in ("devices", "processes")
        )
        each = (median(x, 0, max) for x in rates.values())
        row(model, *each, ", ".join(f"{statistics.median(x):.2f}" for x in faster))


def convolutions(options: Any) -> None:
    """Prints the milliseconds of each convolution."""
    lj.emulate_devices(1)
    head("convolution", "value", "gradient of the images", "of the kernel")
    for name, layer in LAYERS.items():
        cells = []
        for of, ours in in_jax(*layer).items():
            settings = {"layer": list(layer), "of": of, "batch_size": BATCH}
            with Peers(options.torch, "convolution", 1, CORES, **settings) as theirs:
                arms = {"lsgd_jax": ours, "PyTorch": theirs}
                times = in_turns(arms, options.rounds, BLOCK)
            cells.append(" and ".join(f"{min(x):.2f}" for x in times.values()))
        row(name, *cells)


def in_jax(side, inputs, outputs, size, padding) -> dict[str, TimedStep]:
    """Returns a convolution and its gradients as arms."""
    x = jnp.ones((BATCH, side, side, inputs))
    kernel = jnp.ones((size, size, inputs, outputs))

    def padded(x, kernel):
        borders = [(padding, padding)] * 2
        layout = layers.LAYOUT
        return lax.conv_general_dilated(
            x, kernel, (1, 1), borders, dimension_numbers=layout
        )

    apply = padded if padding else layers.valid
    of_images = lambda g: jax.vjp(lambda x: apply(x, kernel), x)[1](g)
    of_kernel = lambda g: jax.vjp(lambda k: apply(x, k), kernel)[1](g)
    y = apply(x, kernel)
    return {
        "value": arm(apply, x, kernel),
        "images": arm(of_images, y),
        "kernel": arm(of_kernel, y),
    }


def arm(fn: Callable[..., jax.Array], *args: jax.Array) -> TimedStep:
    """Returns a function of constant arguments as an arm."""
    call = jax.jit(fn)
    return TimedStep(lambda _, *args: [call(*args)], [None], *args)


def main() -> None:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument("--convolutions", action="store_true")
    words.add_argument("--models", nargs="+", default=["cnn7", "resnet20"])
    words.add_argument("--rounds", type=int, default=5, help="pairs of blocks")
    words.add_argument("--steps", type=int, default=32, help="training steps of a block")
    add_torch(words)
    options = words.parse_args()
    lj.tune_cpu()
    convolutions(options) if options.convolutions else train(options)


if __name__ == "__main__":
    main()
