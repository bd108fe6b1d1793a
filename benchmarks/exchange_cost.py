"""The cost of an exchange: lsgd with and without a pull, beside the base optimizer alone.

    python benchmarks/exchange_cost.py [--repetitions 7] [--sizes 0.35 24]
    python benchmarks/exchange_cost.py --processes 4 [--torch PYTHON]

Workers hold some million float32 parameters in many leaves. Each repetition times AdamW
alone, AdamW and lsgd on steps without a pull ("silent"; "not due": compiled for such steps
only), and on steps with one. The script prints medians (and minima) of the milliseconds per
step, and their ratio to AdamW alone in the same repetition. The workers are 8 devices of
one process in two nodes. With `--processes N` they are N processes of one device in one
node; with `--torch`, as many processes of PyTorch take turns with them (`torch_pull.py`).
`--compile N...` times compilation for N leaves instead. Memory: about 20 bytes per
parameter and worker.
"""

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import optax
from gpu import free_port
from torch_peers import Peers

import lsgd_jax as lj


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.35, 24.0])
    parser.add_argument("--leaves", type=int, default=40)
    parser.add_argument("--bases", nargs="+", default=["adamw", "sgd"])
    parser.add_argument("--compile", type=int, nargs="+", default=[])
    parser.add_argument(
        "--torch", metavar="PYTHON", help="one with PyTorch; needs --processes"
    )
    parser.add_argument("--process-id", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch and options.processes == 1:
        parser.error("--torch needs --processes")
    if options.torch and shutil.which(options.torch) is None:
        parser.error(f"--torch must name a Python interpreter, got {options.torch}")
    return options


def launch(options):
    """Starts the processes and waits for them."""
    command = [sys.executable, *sys.argv, "--port", str(free_port()), "--process-id"]
    children = [subprocess.Popen([*command, str(i)]) for i in range(options.processes)]
    sys.exit(max(child.wait() for child in children))


def sizes_of(size, leaves):
    """Returns the sizes of leaves of `size` million elements; eight leaves hold half."""
    wanted = int(size * 1e6)
    big = wanted // 2 // 8
    return [big] * 8 + [(wanted - 8 * big) // (leaves - 8)] * (leaves - 8)


class Jitted:
    """A step of lsgd_jax and its state."""

    def __init__(self, step, x, state, grads, loss):
        self._step, self._state, self._given = step, (x, state), (grads, loss)

    def seconds_per_step(self, steps):
        """Runs a block of steps and returns the seconds per step."""
        jax.block_until_ready(self._state)
        began = time.perf_counter()
        for _ in range(steps):
            self._state = jax.block_until_ready(self._step(*self._state, *self._given))
        return (time.perf_counter() - began) / steps


def peers(options, base, size, folder):
    """Returns the same steps in PyTorch by name."""
    settings = dict(
        program="torch_pull.py",
        sizes=sizes_of(size, options.leaves),
        base=base,
        threads=max(1, len(os.sched_getaffinity(0)) // options.processes),
    )
    start = lambda **more: Peers(
        options.torch, folder, options.processes, **settings, **more
    )
    return {"PyTorch, alone": start(), "PyTorch, one pull": start(pull=True)}


def build(base, method, due, size, leaves, workers):
    """Returns (step, params, state, grads) of a chain on `size` million parameters."""
    tree = {f"leaf{i:03}": jnp.ones(n) for i, n in enumerate(sizes_of(size, leaves))}
    tx = optax.chain({"adamw": optax.adamw(1e-3), "sgd": optax.sgd(1e-3)}[base], *method)

    def train_step(x, state, g, loss):
        u, state = tx.update(g, state, x, value=loss, due=due)
        return lj.apply_updates(x, u), state

    params = workers.replicate(tree)
    grads = workers.replicate(jax.tree.map(lambda x: 1e-3 * x, tree))
    state = workers.map(tx.init)(params)
    return workers.map(train_step, donate=(0, 1)), params, state, grads


def measure(options):
    """Times the arms and prints the table."""
    count = 8
    if options.process_id is not None:
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(
            f"127.0.0.1:{options.port}", options.processes, options.process_id
        )
        count = options.processes
    else:
        lj.emulate_devices(count)
        lj.tune_cpu()
    main = jax.process_index() == 0
    nodes = 2 if options.process_id is None else 1
    workers = lj.Workers(nodes, count // nodes)
    loss = workers.put(jnp.arange(float(count)))
    methods = {
        "alone": ([], None),
        "silent": ([lj.lsgd(0.1, 0.1, 1_000_000, 1_000_000)], None),
        "not due": ([lj.lsgd(0.1, 0.1, 1_000_000, 1_000_000)], False),
        "one pull": ([lj.lsgd(0.1, 0.0, 1, 1)], None),
    }
    if main:
        print(f"jax {jax.__version__}, {workers}")
        print("| base | M parameters | | ms, median (min) | ratio, median (min) |")
        print("| --- | --- | --- | --- | --- |")
    for base, size in itertools.product(options.bases, options.sizes):
        steps, leaves = 20 if size < 2 else 3, options.leaves
        arms = {}
        for name, (method, due) in methods.items():
            arms[name] = Jitted(*build(base, method, due, size, leaves, workers), loss)
        with tempfile.TemporaryDirectory() as folder:
            theirs = peers(options, base, size, folder) if options.torch and main else {}
            times = in_turns(arms | theirs, options.repetitions, steps)
            for each in theirs.values():
                each.end()
        if main:
            report(base, size, times)


def in_turns(arms, repetitions, steps):
    """Returns each arm's milliseconds per step; its first block compiles and is dropped."""
    times = {name: [] for name in arms}
    for _ in range(repetitions + 1):
        for name, arm in arms.items():
            times[name].append(1e3 * arm.seconds_per_step(steps))
    return {name: seen[1:] for name, seen in times.items()}


def report(base, size, times):
    """Prints a row for each arm."""
    cell = lambda x, digits: f"{statistics.median(x):.{digits}f} ({min(x):.{digits}f})"
    for name, seen in times.items():
        ratios = [a / b for a, b in zip(seen, times["alone"])]
        row = base, size, name, cell(seen, 1), cell(ratios, 2)
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def measure_compilation(options):
    """Prints the seconds to compile Adam with and without lsgd, on two devices and one."""
    lj.emulate_devices(2)
    lj.tune_cpu()
    print("| leaves | devices | Adam, s | Adam + lsgd, s | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for leaves in options.compile:
        for devices in (2, 1):
            workers = lj.Workers(1, 2, devices=jax.devices()[:devices])
            tree = {f"leaf{i:03}": jnp.ones((16, 16 + i % 3)) for i in range(leaves)}
            params, loss = workers.replicate(tree), workers.put(jnp.ones(2))
            seconds = []
            for method in ([], [lj.lsgd(0.1, 0.1, 16, 64)]):
                tx = optax.chain(optax.adam(1e-3), *method)

                def train_step(x, state, g, loss, tx=tx):
                    u, state = tx.update(g, state, x, value=loss)
                    return lj.apply_updates(x, u), state

                state = jax.eval_shape(workers.map(tx.init), params)
                started = time.perf_counter()
                workers.map(train_step).lower(params, state, params, loss).compile()
                seconds.append(time.perf_counter() - started)
            print(
                f"| {leaves} | {devices} | {seconds[0]:.1f} | {seconds[1]:.1f} | "
                f"{seconds[1] / seconds[0]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    arguments = parse()
    if jax.config.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")
    if arguments.compile:
        measure_compilation(arguments)
    elif arguments.processes > 1 and arguments.process_id is None:
        launch(arguments)
    else:
        measure(arguments)
