"""What an exchange costs: a pull and a silent step of lsgd beside the base optimizer alone.

    python benchmarks/exchange_cost.py [--processes 4] [--repetitions 7] [--sizes 0.35 24]

Workers hold some million float32 parameters in many leaves. Each repetition times, one
after the other, AdamW alone, AdamW and lsgd on steps without a pull ("silent"; "not due":
compiled for these alone), and on steps with one. Printed are medians (and minima) of the
milliseconds per step and the ratio to AdamW of the same repetition. `--processes N` takes
N processes of one device in place of 8 devices of one. `--compile N...` times compilation
for that many leaves instead. Memory: about 20 bytes per parameter and worker.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.35, 24.0])
    parser.add_argument("--leaves", type=int, default=40)
    parser.add_argument("--bases", nargs="+", default=["adamw", "sgd"])
    parser.add_argument("--compile", type=int, nargs="+", default=[])
    parser.add_argument("--process-id", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(options):
    """Starts the processes and waits for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *sys.argv, "--port", str(port), "--process-id"]
    children = [subprocess.Popen([*command, str(i)]) for i in range(options.processes)]
    sys.exit(max(child.wait() for child in children))


def build(lj, jax, jnp, optax, base, method, due, size, leaves, workers):
    """(step, params, state, grads) of a chain on parameters of so many million elements."""
    wanted = int(size * 1e6)
    big = wanted // 2 // 8  # eight large leaves hold half of it
    small = (wanted - 8 * big) // (leaves - 8)
    tree = {f"big{i}": jnp.ones(big) for i in range(8)}
    tree |= {f"small{i:03}": jnp.ones(small) for i in range(leaves - 8)}
    tx = optax.chain({"adamw": optax.adamw(1e-3), "sgd": optax.sgd(1e-3)}[base], *method)

    def train_step(x, state, g, loss):
        u, state = tx.update(g, state, x, value=loss, due=due)
        return lj.apply_updates(x, u), state

    params = workers.replicate(tree)
    grads = workers.replicate(jax.tree.map(lambda x: 1e-3 * x, tree))
    state = workers.map(tx.init)(params)
    return workers.map(train_step, donate=(0, 1)), params, state, grads


def measure(options):
    import jax

    count = 8
    if options.process_id is not None:
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(
            f"127.0.0.1:{options.port}", options.processes, options.process_id
        )
        count = options.processes
    import jax.numpy as jnp
    import optax

    import lsgd_jax as lj

    if options.process_id is None:
        lj.emulate_devices(count)
    main = jax.process_index() == 0
    workers = lj.Workers(nodes=2, locals=count // 2)
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
    for base in options.bases:
        for size in options.sizes:
            steps = 20 if size < 2 else 3
            times = {name: [] for name in methods}
            runs = {}
            for name, (method, due) in methods.items():
                leaves = options.leaves
                runs[name] = list(
                    build(lj, jax, jnp, optax, base, method, due, size, leaves, workers)
                )
            for repetition in range(options.repetitions + 1):
                for name, run in runs.items():
                    step, x, state, g = run
                    jax.block_until_ready((x, state))
                    started = time.perf_counter()
                    for _ in range(steps):
                        x, state = step(x, state, g, loss)
                        jax.block_until_ready(x)
                    run[1:3] = x, state
                    if repetition:  # the first compiles
                        times[name].append((time.perf_counter() - started) / steps * 1e3)
            for name, seen in times.items():
                ratios = [a / b for a, b in zip(seen, times["alone"])]
                if main:
                    print(
                        f"| {base} | {size} | {name} | {statistics.median(seen):.1f} "
                        f"({min(seen):.1f}) | {statistics.median(ratios):.2f} "
                        f"({min(ratios):.2f}) |",
                        flush=True,
                    )
            del runs


def measure_compilation(options):
    """Seconds to compile Adam alone, and Adam with lsgd, on one device and on two."""
    import jax

    import lsgd_jax as lj

    lj.emulate_devices(2)
    import jax.numpy as jnp
    import optax

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
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if arguments.compile:
        measure_compilation(arguments)
    elif arguments.processes > 1 and arguments.process_id is None:
        launch(arguments)
    else:
        measure(arguments)
