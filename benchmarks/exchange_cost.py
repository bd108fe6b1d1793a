"""The cost of an exchange: lsgd with and without a pull, beside the base optimizer alone.

    python benchmarks/exchange_cost.py [--repetitions 7] [--sizes 0.35 24]
    python benchmarks/exchange_cost.py --processes 4 [--torch PYTHON]

Workers hold some million float32 parameters in many leaves. Each repetition times AdamW
alone, and AdamW and lsgd on steps with a pull in the node, on steps that are not due, and
on such steps compiled with due=False. The script prints medians (and minima) of the
milliseconds per step, and their ratio to AdamW alone in the same repetition. The workers
are 8 devices of one process in two nodes. With `--processes N` they are N processes of one
device in one node; with `--torch`, as many processes of PyTorch take turns with them.
Memory: about 20 bytes per parameter and worker.
"""

import argparse
import contextlib
import functools
import itertools
import shutil
import subprocess
import sys

import jax
import optax
from against_pytorch import CORES, Peers
from gpu import NEVER, Pulling, sizes_of
from side_by_side import one_device
from usage import head, median, parser, row

import lsgd_jax as lj
from train.accept.turns import in_turns, ratios
from train.launch import free_port


BASES = {"adamw": optax.adamw, "sgd": optax.sgd}
LEAVES = 40


def parse():
    words = parser(__doc__)
    words.add_argument("--processes", type=int, default=1)
    words.add_argument("--repetitions", type=int, default=7)
    words.add_argument("--sizes", type=float, nargs="+", default=[0.35, 24.0])
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
    one_device(options.port, options.processes, options.process_id)
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
    for base, size in itertools.product(BASES, options.sizes):
        sizes = sizes_of(size, LEAVES)
        arms = Pulling(grid, sizes, of_period, BASES[base](1e-3)).arms()
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


def main():
    options = parse()
    if jax.config.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")
    if options.processes > 1 and options.process_id is None:
        launch(options)
    if options.process_id is None:
        lj.emulate_devices(8)
        lj.tune_cpu()
    measure(options)


if __name__ == "__main__":
    main()
