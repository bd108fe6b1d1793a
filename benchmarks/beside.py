"""An exchange that steps wait for, and one that travels beside them: two hosts.

Command:   sudo "$(which python)" benchmarks/beside.py --rate 100mbit
Hardware:  any CPU; Linux, root, iproute2: 2 hosts are network namespaces on one bridge
Prints:    for each form of the exchange the milliseconds of a step in the mean, those of
           the steps without an exchange before it, and the seconds of a period by which
           it is longer

The forms take turns in one run: the machine's other work slows all of them alike. An
exchange beside the training has a CPU device of its own in each process.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from limited_hosts import join, work_or_run
from usage import head, parser, row

import lsgd_jax as lj
from train.run import cli


PROCESSES = 2
WIDTHS = [256, *[1024] * 5, 512]  # of the layers of a network
PERIOD = 16
BASE = f"digits --workers.nodes {PROCESSES} --workers.locals 1".split()
TX = optax.adamw(1e-4)
FORMS = ("none", "waits", "in the step", "beside")


def network() -> list[dict[str, np.ndarray]]:
    """The parameters of a network, a matrix and a vector for each layer."""
    draw = np.random.default_rng(0).normal
    layers = []
    for before, after in zip(WIDTHS, WIDTHS[1:]):
        kernel = draw(size=(before, after)) / before**0.5
        layers.append({"kernel": kernel.astype(np.float32), "bias": np.zeros(after, "f")})
    return layers


def loss_of(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    x = inputs
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return jnp.square(x @ params[-1]["kernel"] + params[-1]["bias"] - targets).mean()


def update(state: Any, batch: Any) -> Any:
    """A training step of one worker: (state, loss)."""
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, *batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def form_of(
    name: str, wire: Any, delay: int, workers: lj.Workers, start: Any
) -> tuple[Callable[..., Any], Any]:
    """The step in one form, and its state."""
    if name == "none":
        return workers.map(update, donate=0), jax.tree.map(jnp.copy, start)
    lag = 0 if name == "waits" else delay
    train = lj.around(update, lj.diloco(PERIOD, delay=lag, wire=wire), params=0)
    state = workers.map(train.init)(jax.tree.map(jnp.copy, start))
    # With this in flight gloo has ended the processes at `wait_for_all`: it had received a
    # message of another size.
    jax.block_until_ready(state)
    return workers.loop(train, donate=0, beside=name == "beside"), state


def work(options: argparse.Namespace) -> None:
    """Runs one process."""
    session = join(cli.parse(BASE), options, PROCESSES, each=2)
    workers = lj.Workers(PROCESSES, 1)
    session.connect(workers.mesh)
    params = jax.tree.map(jnp.asarray, network())
    start = workers.replicate((params, TX.init(params)))
    draw = np.random.default_rng(jax.process_index()).normal
    shapes = [(options.batch, WIDTHS[0]), (options.batch, WIDTHS[-1])]
    batch = workers.put_owned(tuple(np.float32(draw(size=(1, *s))) for s in shapes))
    if session.is_main:
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        print(f"{count:,} parameters, {options.rate}, an exchange every {PERIOD} steps")
        head("wire", "exchange", "ms a step", "without", "s a period longer")
    for wire in options.wires:
        forms = {name: form_of(name, wire, options.delay, workers, start) for name in FORMS}
        seconds: dict[str, list[float]] = {name: [] for name in FORMS}
        for _ in range(options.periods + 1):
            for name, (step, state) in forms.items():
                session.wait_for_all()
                began = time.perf_counter()
                for _ in range(PERIOD):
                    state, loss = step(state, batch)
                    jax.block_until_ready(loss)
                jax.block_until_ready(state)
                seconds[name].append(time.perf_counter() - began)
                forms[name] = step, state
        if session.is_main:
            # The first period compiles, and its exchange lands in the second one.
            quiet = np.mean(seconds["none"][1:])
            for name in FORMS[1:]:
                period = np.mean(seconds[name][1:])
                ms = f"{1e3 * period / PERIOD:.0f}"
                row(wire, name, ms, f"{1e3 * quiet / PERIOD:.0f}", f"{period - quiet:.2f}")


def main() -> None:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument("--delay", type=int, default=14, help="steps until a target lands")
    words.add_argument("--batch", type=int, default=256, help="examples of a worker")
    words.add_argument("--periods", type=int, default=4, help="timed periods of each form")
    words.add_argument("--wires", nargs="+", default=["float32", "int8"], metavar="WIRE")
    work_or_run(words, work, PROCESSES)


if __name__ == "__main__":
    main()
