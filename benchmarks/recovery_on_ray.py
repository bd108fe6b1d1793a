"""Seconds until a lost asynchronous worker steps again on Ray, part by part.

Command:   python benchmarks/recovery_on_ray.py [--width 1024] [--repetitions 3]
Hardware:  any CPU; Linux, because the start of a process is read in /proc
Prints:    a row per part, medians over the repetitions: without a compilation cache, and
           with one that the lost worker and its successor share; the steps of the slowest
           other worker meanwhile, in percent of those in as many seconds before

Four workers train dense layers with DiLoCo, each at its own pace. A step takes --step-ms,
most of it asleep in place of an accelerator's work. After --steps-before steps worker 1 is
killed (SIGKILL).
"""

import json
import os
import pathlib
import signal
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import optax
from usage import head, one_line_errors, parser, row

from lsgd_jax import asynchronous as at


WORKERS = 4
LOST = 1  # the worker that is killed
CLASSES = 10
BATCH = 32

# Each part ends at an event of the successor, in this order.
PARTS = {
    "the loss is noticed, and a process starts": "process",
    "imports of Python, Ray and jax": "make",
    "the training is made (data, optimizer)": "made",
    "the step is compiled": "compiled",
    "parameters come from a peer, and it joins": "second",
    "its first step": "stepped",
}
TOGETHER = "together"
OTHERS = "steps of the slowest other worker meanwhile, in percent"


def parse():
    words = parser(__doc__)
    words.add_argument("--width", type=int, default=1024, help="of each dense layer")
    words.add_argument("--layers", type=int, default=4)
    words.add_argument("--step-ms", type=float, default=100)
    words.add_argument("--steps-before", type=int, default=60)
    words.add_argument("--period", type=int, default=20, help="steps between exchanges")
    words.add_argument("--repetitions", type=int, default=3)
    return words.parse_args()


def started_at():
    """Returns when this process was started, in seconds since the epoch."""
    # The 22nd field of stat is in ticks since the host was started; the second one is a
    # name in brackets, which may hold spaces.
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    uptime = float(pathlib.Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + since_boot


class Notes:
    """The events of a worker's process, a line each, in a file that others read.

    Args:
      folder: of the files.
      index: the worker.
    """

    def __init__(self, folder, index):
        self._path = pathlib.Path(folder, f"{index}-{os.getpid()}")

    def write(self, event, when=None):
        when = time.time() if when is None else when
        with self._path.open("a") as file:
            file.write(json.dumps([event, when]) + "\n")


def events_of(folder, index):
    """Returns the events [(event, seconds)] of each process of a worker, in their order."""
    files = pathlib.Path(folder).glob(f"{index}-*")
    all_events = [list(map(json.loads, file.read_text().splitlines())) for file in files]
    return sorted(all_events, key=lambda events: events[0][1])


def training(options, folder):
    """Returns a function that makes the training of a worker, and notes when."""

    def make(index):
        notes = Notes(folder, index)
        notes.write("process", started_at())
        notes.write("make")
        keys = jax.random.split(jax.random.key(0), options.layers + 1)
        width = options.width
        layers = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[1:]]
        last = jnp.zeros((width, CLASSES))
        params = layers, last
        tx = optax.adamw(1e-3)

        def loss_of(params, x, labels):
            layers, last = params
            for weights in layers:
                x = jax.nn.relu(x @ weights)
            logits = x @ last
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        @jax.jit
        def learn(params, opt_state, own, t):
            key = jax.random.fold_in(own, t)
            x = jax.random.normal(key, (BATCH, width))
            labels = jax.random.randint(key, (BATCH,), 0, CLASSES)
            loss, grads = jax.value_and_grad(loss_of)(params, x, labels)
            updates, opt_state = tx.update(grads, opt_state, params)
            return updates, opt_state, own, loss

        calls = 0

        def step(params, opt_state, own, t):
            nonlocal calls
            calls += 1
            if calls == 2:
                notes.write("second")
            begun = time.perf_counter()
            stepped = jax.block_until_ready(learn(params, opt_state, own, t))
            if calls == 1:
                # The engine calls the step once to compile it.
                notes.write("compiled")
                return stepped
            time.sleep(max(0.0, options.step_ms / 1000 - (time.perf_counter() - begun)))
            notes.write("stepped")
            return stepped

        own = jax.random.key(index)
        first = jax.block_until_ready((params, tx.init(params), own))
        notes.write("made")
        return at.Training(lambda i: first, step)

    return make


class Killing:
    """Kills a worker's process at its time; stops the run when its successor has stepped.

    Args:
      options: of the command.
      folder: of the events.
    """

    def __init__(self, options, folder):
        self._options = options
        self._folder = folder
        self.killed = None

    def __call__(self, status, remote):
        if self.killed is None:
            ready = min(report.steps for report in status.reports.values())
            if ready >= self._options.steps_before:
                _, process = remote.processes[LOST]
                self.killed = time.time()
                os.kill(process, signal.SIGKILL)
        elif not remote.stopped and successor_has_stepped(self._folder):
            remote.stop()


def successor_has_stepped(folder):
    """Returns whether the second process of the lost worker has taken a step."""
    processes = events_of(folder, LOST)
    return len(processes) > 1 and any(event == "stepped" for event, _ in processes[-1])


def measure(options, cache):
    """Returns the column of a run: a number for each row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        killing = Killing(options, folder)
        env = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        if cache is not None:
            env = {
                "JAX_COMPILATION_CACHE_DIR": cache,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
            }
        at.ray_engine.run(
            training(options, folder),
            at.DiLoCo(local_steps=options.period),
            nodes=1,
            locals=WORKERS,
            steps=10**6,
            options=at.ray_engine.ClusterOptions(env=env),
            on_status=killing,
        )
        events = dict(reversed(events_of(folder, LOST)[-1]))  # the first of each kind
        others = [events_of(folder, i)[-1] for i in range(WORKERS) if i != LOST]
    killed = killing.killed
    column = {}
    previous = killed
    for part, event in PARTS.items():
        column[part] = events[event] - previous
        previous = events[event]
    lasted = previous - killed
    column[TOGETHER] = lasted
    shares = [
        steps_between(ends, killed, previous) / steps_between(ends, killed - lasted, killed)
        for ends in others
    ]
    column[OTHERS] = 100 * min(shares)
    return column


def steps_between(events, begin, end):
    """Returns the number of steps that ended in this time."""
    return sum(event == "stepped" and begin < when <= end for event, when in events)


def main():
    options = parse()
    with tempfile.TemporaryDirectory() as cache:
        measured = {}
        for name, folder in (("no cache", None), ("shared cache", cache)):
            measured[name] = [measure(options, folder) for _ in range(options.repetitions)]
    head("seconds", *measured)
    for name in (*PARTS, TOGETHER, OTHERS):
        medians = [
            statistics.median(run[name] for run in runs) for runs in measured.values()
        ]
        row(name, *(f"{value:.2f}" for value in medians))


if __name__ == "__main__":
    with one_line_errors():
        main()
