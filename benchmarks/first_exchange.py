"""Seconds until the first exchange is done, beside the step alone.

    python benchmarks/first_exchange.py [--ways loop phases] [--methods int8 unequal]
    python benchmarks/first_exchange.py --layers 1 --methods local_sgd

Four workers train an MLP of 4.75 million parameters on emulated devices. Each row is a
process of its own without a compilation cache. It takes 16 steps, in which all fragments
are exchanged. A row has the seconds (and CPU seconds of all threads) from the first call
until the first exchange is done, and until step 16 is done. The ratios compare it with the
step without a method, in the same turn.

The way `loop` is `Workers.loop`, and `phases` a program of the whole step for each phase.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from usage import head, parser, row

import lsgd_jax as lj


STEPS = 16
WORKERS = 4
SIZES = (784, 1024, 1024, 1024, 1024, 768, 10)
EQUAL_LAYERS = 4  # in each of the stacked weights
EQUAL_WIDTH = 444
METHODS = {
    "local_sgd": lambda: lj.local_sgd(STEPS),
    "int8": lambda: lj.diloco(STEPS, wire="int8"),
    "equal": lambda: lj.diloco(STEPS, fragments=4, scan_axis=0),
    "unequal": lambda: lj.diloco(STEPS, fragments=4),
    "sparse": lambda: lj.contrib.sparse_diloco(STEPS),
}
WAYS = ("loop", "phases")
TX = optax.adamw(1e-3)
draw = np.random.default_rng(0).normal


def unequal_layers(count):
    """The parameters, the function and the width of its input."""
    pairs = list(zip(SIZES, SIZES[1:]))[:count]
    weights = [np.float32(draw(size=pair) / pair[0] ** 0.5) for pair in pairs]
    biases = [np.zeros(width, np.float32) for _, width in pairs]

    def output(params, x):
        for w, b in zip(*params):
            x = jnp.tanh(x @ w + b)
        return x

    return (weights, biases), output, SIZES[0]


def equal_layers(count):
    """The same with layers that are stacked, so that fragments are alike."""
    layers = EQUAL_LAYERS
    width = EQUAL_WIDTH
    shape = layers, width, width
    weights = [np.float32(draw(size=shape) / width**0.5) for _ in range(count)]
    biases = [np.zeros(shape[:2], np.float32) for _ in range(count)]

    def output(params, x):
        for layer in range(layers):
            for w, b in zip(*params):
                x = jnp.tanh(x @ w[layer] + b[layer])
        return x

    return (weights, biases), output, width


def clock():
    """Seconds, and CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([time.perf_counter(), used.ru_utime + used.ru_stime])


def steps_of(way, name, workers, params, loss_of):
    """The first state, the step (state, batch, t) -> state, and the first exchange."""
    grad = jax.value_and_grad(loss_of)

    def update(state, x):
        params, opt_state = state
        loss, grads = grad(params, x)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    if name.startswith("plain"):
        program = workers.map(update, donate=0)
        start = workers.replicate((params, jax.jit(TX.init)(params)))
        return start, lambda state, batch, t: program(state, batch)[0], 1
    method = METHODS[name]()
    quiet = lj.Phase()
    first = next(t for t in range(1, STEPS + 1) if method.phase(t) != quiet)
    train = lj.around(update, method, params=0)
    start = workers.replicate((params, jax.jit(TX.init)(params)))
    start = workers.map(train.init)(start)
    if way == "loop":
        loop = workers.loop(train, donate=0)
        return start, lambda state, batch, t: loop(state, batch)[0], first
    program = workers.map(train, donate=0, static="phase")

    def step(state, batch, t):
        return program(state, batch, phase=train.phase(t, workers.sizes))[0]

    return start, step, first


def measure(way, name, count):
    """Takes the steps and prints a row."""
    lj.emulate_devices(WORKERS)
    workers = lj.Workers(1, WORKERS)
    layers = equal_layers if name in ("equal", "plain_equal") else unequal_layers
    params, output, width = layers(count)

    def loss_of(params, x):
        return jnp.square(output(params, x)).mean()

    state, step, first = steps_of(way, name, workers, params, loss_of)
    batch = workers.put(np.float32(draw(size=(WORKERS, 8, width))))
    jax.block_until_ready(state)
    begin = clock()
    for t in range(1, STEPS + 1):
        state = step(state, batch, t)
        if t == first:
            jax.block_until_ready(state)
            at_first = clock() - begin
    jax.block_until_ready(state)
    every = clock() - begin
    print(json.dumps({"first": [*at_first], "all": [*every], "step": first}))


def measured(way, name, options):
    """The row that a process of its own measures."""
    command = [sys.executable, __file__, "--row", way, name]
    command += ["--layers", str(options.layers)]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def parse():
    words = parser(__doc__)
    words.add_argument("--ways", nargs="+", choices=WAYS, default=["loop"])
    words.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    words.add_argument("--turns", type=int, default=1)
    words.add_argument("--layers", type=int, default=len(SIZES) - 1, help="of the MLP")
    words.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    return words.parse_args()


def main():
    options = parse()
    if options.row:
        measure(*options.row, options.layers)
        return
    head("method", "first exchange", "until it, s (CPU)", "16 steps, s (CPU)", "ratios")
    for _ in range(options.turns):
        plain = {}
        for name in options.methods:
            base = "plain_equal" if name == "equal" else "plain"
            if base not in plain:
                plain[base] = measured("loop", base, options)
                show(base, plain[base], plain[base])
            for way in options.ways:
                show(f"{name}, {way}", measured(way, name, options), plain[base])


def show(name, found, plain):
    """Prints a row, and its seconds as multiples of those of the step alone."""
    until = [found["first"], found["all"]]
    shown = ["{:.2f} ({:.2f})".format(*each) for each in until]
    ratios = [found[key][0] / plain[key][0] for key in ("first", "all")]
    row(name, f"step {found['step']}", *shown, "{:.2f}, {:.2f}".format(*ratios))


if __name__ == "__main__":
    main()
