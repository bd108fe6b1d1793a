"""Asynchronous workers beside workers in lock step: the same rules, on Ray.

Command:   python benchmarks/asynchronous.py [--slow 3] [--rate 100mbit]
Hardware:  any CPU; with --rate Linux, root, iproute2
Prints:    a row per method, medians over the repetitions: steps of all workers per second,
           in percent of those without communication, and as the simulator predicts them;
           seconds until the mean of the workers has a test error of at most --error, mean
           staleness in steps, and MB sent per worker and 100 of its steps

Four workers train a network of 0.3 M parameters on scikit-learn's digits, with each method
in turn. A step takes --step-ms, most of it asleep in place of an accelerator's work, so
that the workers do not compete for cores. With --slow 3 a step of worker 0 takes three
times as long. With --rate each worker has its own host, a network namespace whose link has
this rate. Messages travel in Ray's replies or, with --store, through its object stores.

The simulator is given the duration of a step, the rate of the links, of which TCP leaves
94 % to messages, and the milliseconds of Ray's software around a message. Without --rate
only this software takes time.

Speeds are counted from the first exchange on, which compiles. The test errors are those of
snapshots that every worker keeps until it ends, so they do not use the network.
"""

import argparse
import math
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from limited_hosts import bits_of, limited_hosts, ray_on
from usage import head, parser, row

import lsgd_jax as lj
from lsgd_jax import asynchronous as at
from train.data import digits
from train.planning.engine import still


WORKERS = 4
BATCH = 32
WIDTH = 512
RATE = 0.05
SNAPSHOT = 10  # steps between two snapshots
OVERHEAD = 0.011  # seconds of a message on Ray
ALONE = "no communication"


def methods(period, delay):
    """Returns the methods to compare, all with the same period."""
    lsgd = lambda **more: lj.lsgd(0.0, 0.1, period, period, **more)
    return {
        ALONE: at.Pulls(lj.local_sgd(10**6)),
        "lsgd, in lock step": at.Pulls(lsgd()),
        f"lsgd, overlapped (delay {delay})": at.Pulls(lsgd(delay=delay)),
        "async-lsgd, blocking": at.Pulls(lsgd(), budget=True),
        "async-lsgd": at.LSGD(0.0, 0.1, period, period),
        "async-dpwa": at.Pairwise(fetch_probability=1 / period),
        "async-adpsgd": at.ADPSGD(),
        "async-wagma": at.WAGMA(group_size=2, sync_period=period),
        "diloco, in lock step": at.Pulls(lj.diloco(period)),
        f"diloco, overlapped (delay {delay})": at.Pulls(lj.diloco(period, delay=delay)),
        "async-diloco": at.DiLoCo(local_steps=period, momentum=0.9),
    }


def parse():
    words = parser(__doc__)
    words.add_argument("--steps", type=int, default=320, help="mean steps per worker")
    words.add_argument("--step-ms", type=float, default=50)
    words.add_argument("--period", type=int, default=24, help="steps between exchanges")
    words.add_argument("--delay", type=int, default=16, help="steps of overlap")
    words.add_argument("--slow", type=float, default=1, help="slowdown of worker 0")
    words.add_argument(
        "--rate", help="rate of each host's link in the words of tc, as 100mbit"
    )
    words.add_argument(
        "--store", action="store_true", help="with --rate: send through Ray's object stores"
    )
    words.add_argument("--error", type=float, default=4.0, help="in percent, to reach")
    words.add_argument("--repetitions", type=int, default=3)
    words.add_argument("--only", nargs="+", help="run only these methods")
    words.add_argument("--address", help=argparse.SUPPRESS)  # of the hosts' Ray
    return words.parse_args()


# Training


def data():
    """Returns the digits: inputs [N, 64] and labels for training, and for testing."""
    data = digits.load()
    flat = lambda x: x.reshape(-1, 64).astype(np.float32) / 255
    train = data.train
    test = data.test
    return flat(train.images), train.labels, flat(test.images), test.labels


def start():
    """Returns random layers with the variance of weights that ReLU asks for."""
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (64, WIDTH, WIDTH, 10)
    weights = lambda key, a, b: jax.random.normal(key, (a, b)) * (2 / a) ** 0.5
    each = zip(keys, sizes, sizes[1:])
    return [(weights(key, a, b), jnp.zeros((1, b))) for key, a, b in each]


def forward(layers, x):
    """Returns logits [B, 10] of images [B, 64]."""
    for weights, bias in layers[:-1]:
        x = jax.nn.relu(x @ weights + bias)
    weights, bias = layers[-1]
    return x @ weights + bias


def training(seconds):
    """Returns a function that makes the training of worker i, whose steps take seconds[i].

    The state of a worker includes its key, the end times of its steps and its snapshots.
    """

    def make(index):
        x, y, *_ = map(jnp.asarray, data())
        tx = optax.sgd(RATE, momentum=0.9)

        @jax.jit
        def learn(params, opt_state, key, t):
            chosen = jax.random.randint(jax.random.fold_in(key, t), (BATCH,), 0, len(x))

            def loss_of(params):
                logits = forward(params, x[chosen])
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, y[chosen])
                return losses.mean()

            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return updates, opt_state, loss

        def step(params, opt_state, own, t):
            begun = time.perf_counter()
            key, ends, snapshots = own
            updates, opt_state, loss = learn(params, opt_state, key, t)
            if t % SNAPSHOT == 1:
                seen = ravel_pytree(params)[0].astype(jnp.float16)
                snapshots = (*snapshots, np.asarray(seen))
            loss.block_until_ready()
            time.sleep(max(0.0, seconds[index] - (time.perf_counter() - begun)))
            return updates, opt_state, (key, np.append(ends, time.time()), snapshots), loss

        params = start()
        key = jax.random.key(index)
        first = params, tx.init(params), (key, np.zeros(0), ())
        jax.block_until_ready(learn(*first[:2], key, jnp.int32(1)))  # compiles
        ravel_pytree(params)[0].astype(jnp.float16).block_until_ready()
        return at.Training(lambda i: first, step)

    return make


# A run


def seconds_to(error, begun, owns):
    """Returns seconds until the mean of the newest snapshots reaches the error, or None."""
    unravel, (*_, x, y) = ravel_pytree(start())[1], data()

    @jax.jit
    def error_of(vector):
        return 100 * (forward(unravel(vector), x).argmax(axis=-1) != y).mean()

    # A snapshot holds the parameters before its step, so its time is the previous end.
    times = [np.r_[begun, ends[:-1]][::SNAPSHOT] for _, ends, _ in owns]
    for now in sorted(np.concatenate(times)):
        newest = [np.searchsorted(when, now, side="right") - 1 for when in times]
        seen = [own[2][max(0, i)] for own, i in zip(owns, newest)]
        if error_of(np.mean(seen, axis=0, dtype=np.float32)) <= error:
            return float(now - begun)
    return None


def simulated(method, options):
    """Returns the simulated steps per second of all workers."""
    ends = [[] for _ in range(WORKERS)]
    bandwidth = 0.94 * bits_of(options.rate) / 8 if options.rate else math.inf
    at.simulator.run(
        still(start()),
        method,
        nodes=WORKERS,
        locals=1,
        steps=options.steps,
        network=at.Network(bandwidth, 0.0, bandwidth, 0.0, OVERHEAD),
        speeds=at.Speeds(options.step_ms / 1e3, slow={0: options.slow}),
        observe=lambda worker: ends[worker.index].append(worker.transport.now()),
    )
    ended = min(each[-1] for each in ends)
    return sum(end <= ended for each in ends for end in each) / ended


def measure(method, options):
    """Runs a method once and returns the cells of its row."""
    seconds = [options.step_ms / 1000] * WORKERS
    seconds[0] *= options.slow
    outcome = at.ray_engine.run(
        training(seconds),
        method,
        nodes=1,
        locals=WORKERS,
        steps=options.steps,
        options=at.ray_engine.ClusterOptions(address=options.address, timeout=30),
    )
    owns = [s["own"] for s in outcome.states]
    reports = outcome.status.reports
    warm = options.period + options.delay  # by then everything is compiled
    begun = max(ends[warm] for _, ends, _ in owns)
    ended = min(ends[-1] for _, ends, _ in owns)
    steps = sum(np.sum((ends > begun) & (ends <= ended)) for _, ends, _ in owns)
    first = max(ends[0] for _, ends, _ in owns)
    mean = lambda values: float(statistics.mean(values))
    return {
        "steps/s": float(steps / (ended - begun)),
        "simulated": simulated(method, options),
        f"s to {options.error:g} %": seconds_to(options.error, first, owns),
        "staleness": mean(r.staleness for r in reports.values()),
        "MB / 100 steps": mean(r.bytes_sent / r.steps for r in reports.values()) / 1e4,
    }


def compare(options):
    """Runs all methods in turns and prints the table."""
    known = methods(options.period, options.delay)
    chosen = {k: m for k, m in known.items() if k in (options.only or known)}
    rows = {name: [] for name in chosen}
    with at.ray_engine.cluster(
        at.ray_engine.ClusterOptions(address=options.address), WORKERS
    ):
        for _ in range(options.repetitions):
            for name, method in chosen.items():
                rows[name].append(measure(method, options))
                print(name, rows[name][-1], file=sys.stderr, flush=True)
    say(rows)


def say(rows):
    """Prints the table of medians."""
    for i, alone in enumerate(rows.get(ALONE, ())):  # of the same repetition
        for found in rows.values():
            found[i]["% of " + ALONE] = 100 * found[i]["steps/s"] / alone["steps/s"]
    columns = list(next(iter(rows.values()))[0])
    head("method", *columns)
    for name, found in rows.items():
        cells = []
        for column in columns:
            values = [run[column] for run in found]
            reached = all(value is not None for value in values)
            cells.append(f"{statistics.median(values):.3g}" if reached else "not reached")
        row(name, *cells)


def main():
    options = parse()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    if not options.rate or options.address:
        return compare(options)
    with (
        limited_hosts(WORKERS, options.rate) as hosts,
        ray_on(hosts, options.store) as address,
    ):
        again = hosts.start(0, [sys.executable, *sys.argv, "--address", address])
        try:
            sys.exit(again.wait())
        finally:
            again.kill()


if __name__ == "__main__":
    main()
