"""The cost of an exchange: lsgd with and without a pull, beside the base optimizer alone.

    python benchmarks/exchange_cost.py [--repetitions 7] [--sizes 0.35 24]
    python benchmarks/exchange_cost.py --processes 4 [--torch PYTHON]
    python benchmarks/exchange_cost.py --trainer

Workers hold some million float32 parameters in many leaves. Each repetition times AdamW
alone, and AdamW and lsgd on steps with a pull in the node, on steps that are not due, and
on such steps compiled with due=False. The script prints medians (and minima) of the
milliseconds per step, and their ratio to AdamW alone in the same repetition. The workers
are 8 devices of one process in two nodes. With `--processes N` they are N processes of one
device in one node; with `--torch`, as many processes of PyTorch take turns with them.
`--compile N...` times compilation for N leaves instead, and `--trainer` the trainer on CNN7
with LSGD's pulls and without. Memory: about 20 bytes per parameter and worker.
"""

import argparse
import contextlib
import functools
import itertools
import shutil
import subprocess
import sys
import time

import jax
import optax
from against_pytorch import CORES, Peers
from gpu import NEVER, Pulling, sizes_of
from side_by_side import in_turns, on_random_images, ratios
from usage import head, median, parser, row

import lsgd_jax as lj
from configs.cifar10_cnn7 import CONFIG
from train.config import WorkersConfig, methods
from train.launch import free_port


def parse():
    words = parser(__doc__)
    words.add_argument("--processes", type=int, default=1)
    words.add_argument("--repetitions", type=int, default=7)
    words.add_argument("--sizes", type=float, nargs="+", default=[0.35, 24.0])
    words.add_argument("--leaves", type=int, default=40)
    words.add_argument("--bases", nargs="+", default=["adamw", "sgd"])
    words.add_argument("--compile", type=int, nargs="+", default=[])
    words.add_argument("--trainer", action="store_true")
    words.add_argument("--torch", metavar="PYTHON", help="one with PyTorch")
    words.add_argument("--process-id", type=int, help=argparse.SUPPRESS)
    words.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.torch and options.processes == 1:
        words.error("--torch needs --processes")
    if options.torch and shutil.which(options.torch) is None:
        words.error(f"--torch must name a Python interpreter, got {options.torch}")
    return options


def launch(options):
    """Starts the processes and waits for them."""
    command = [sys.executable, *sys.argv, "--port", str(free_port()), "--process-id"]
    children = [subprocess.Popen([*command, str(i)]) for i in range(options.processes)]
    sys.exit(max(child.wait() for child in children))


def grid_of(options):
    """Returns the workers: all processes, or emulated devices of this one."""
    if options.process_id is None:
        return lj.Workers(2, 4)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"127.0.0.1:{options.port}", options.processes, options.process_id
    )
    return lj.Workers(1, options.processes)


def of_period(period):
    """Returns LSGD with a pull in the node; that of all nodes is never due."""
    return lj.lsgd(0.1, 0.1, period, NEVER)


def measure(options):
    """Times the arms and prints the table."""
    grid = grid_of(options)
    is_main = jax.process_index() == 0
    if is_main:
        print(f"jax {jax.__version__}, {grid}")
        head("base", "M parameters", "", "ms, median (min)", "ratio, median (min)")
    for base, size in itertools.product(options.bases, options.sizes):
        sizes = sizes_of(size, options.leaves)
        tx = {"adamw": optax.adamw, "sgd": optax.sgd}[base](1e-3)
        arms = Pulling(grid, sizes, of_period, tx).arms()
        with contextlib.ExitStack() as stack:
            if options.torch and is_main:
                threads = max(1, CORES // options.processes)
                peers = functools.partial(
                    Peers, options.torch, "pull", options.processes, threads
                )
                for name, more in {"alone": {}, "a pull": {"pull": True}}.items():
                    peer = stack.enter_context(peers(sizes=sizes, base=base, **more))
                    arms[f"PyTorch, {name}"] = peer
            times = in_turns(arms, options.repetitions, 20 if size < 2 else 3)
        for name, seen in times.items() if is_main else ():
            ratio = median(ratios(seen, times["alone"]), 2)
            row(base, size, name, median(seen), ratio)


def measure_compilation(options):
    """Prints the seconds to compile Adam with and without lsgd, on two devices and one."""
    head("leaves", "devices", "Adam, s", "Adam + lsgd, s", "ratio")
    for leaves, devices in itertools.product(options.compile, (2, 1)):
        workers = lj.Workers(1, 2, devices=jax.devices()[:devices])
        sizes = [16 * (16 + i % 3) for i in range(leaves)]
        make = lambda period: lj.lsgd(0.1, 0.1, 16, 64)
        pulling, seconds = Pulling(workers, sizes, make, optax.adam(1e-3)), []
        for step in (pulling.step(), pulling.step(16)):
            started = time.perf_counter()
            step.lower(*pulling.state, *pulling.given).compile()
            seconds.append(time.perf_counter() - started)
        alone, both = seconds
        row(leaves, devices, f"{alone:.1f}", f"{both:.1f}", f"{both / alone:.1f}")


def measure_trainer(options):
    """Prints the milliseconds of the trainer's steps with pulls and without."""
    arms = {}
    for name, pull in {"without pulls": 0.0, "with pulls": 0.1}.items():
        method = methods.make("lsgd", pull, pull, local_period=16, global_period=64)
        grid = WorkersConfig(nodes=2, locals=4)
        arms[name] = on_random_images(CONFIG, workers=grid, method=method, batch_size=32)
    times = in_turns(arms, options.repetitions, 64)
    head("trainer", "ms, median (min)", "ratio, median (min)")
    for name, seen in times.items():
        row(name, median(seen), median(ratios(seen, times["without pulls"]), 3))


def main():
    options = parse()
    if jax.config.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")
    if options.processes > 1 and options.process_id is None:
        launch(options)
    if options.process_id is None:
        lj.emulate_devices(8)
        lj.tune_cpu()
    if options.compile:
        measure_compilation(options)
    elif options.trainer:
        measure_trainer(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
