"""Staleness: methods under equal simulated time, speeds and failures, on the digits.

    python benchmarks/staleness.py [--workers 8] [--seeds 3] [--out FOLDER]

trains a network of three layers with real gradients while a simulated clock counts steps,
messages and waits. Every run ends after --seconds simulated seconds, however many steps its
workers have taken. A step takes 0.1 s on average; a worker's link carries the parameters in
0.01 s, with a latency of 1 ms. Methods with a period exchange every 8 steps. A worker waits
for another one for at most 2 s. Within a scenario and a seed all methods meet the same step
times and the same failures:

- uniform: step times vary by 10 %.
- one straggler: the steps of one worker take three times as long.
- heavy tail: step times are log-normal with σ = 1, of the same mean.
- leaving and joining: workers fail after 60 s on average and are away for 6 s on average,
  both exponential. A worker that comes back continues from another one's state.

Each worker draws from its own share of the training images. It trains by plain SGD, so that
all-reduce is the mean of the parameters at every step. In lock step the others go on
without a worker that has failed, until it is back. Every method runs at the best of
--rates: the one with the lowest test error of the mean of the workers, averaged over a run
with 8 uniform workers and a seed of its own. All else is at its defaults.

The script prints a Markdown table per scenario, mean ± sd over the seeds: test error of the
mean of the present workers at the end, simulated seconds until it is at most --error, MB
sent per worker, and goodput. Goodput is the number of steps that count, in percent of the
steps of workers that never wait, fail or slow down. The steps that a failing worker took
since its last exchange do not count. With --out, staleness.json and staleness.png are
written into a folder.
"""

import functools
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import small_networks as small
from usage import parser

import lsgd_jax as lj
from lsgd_jax import asynchronous as at
from train.compare import spread
from train.metrics import tables
from train.plots import plt, save, subplots


BATCH = 32
PERIOD, DELAY = 8, 4  # steps
STEP, TRANSFER, LATENCY, TIMEOUT = 0.1, 0.01, 1e-3, 2.0  # seconds
UP, DOWN = 60.0, 6.0  # mean seconds until a worker fails, and until it is back
MOMENTS = 60  # tests of a run
TUNING_SEED, TUNING_WORKERS = 100, 8


class Entry(NamedTuple):
    """A method.

    Attributes:
      method: as the simulator runs it.
      period: steps after which a worker's progress is in what it has sent.
      collectives: whether it runs as a synchronous program.
    """

    method: at.Method
    period: int = PERIOD
    collectives: bool = False


METHODS = {
    "no communication": Entry(at.Pulls(lj.local_sgd(10**6)), 1),
    "all-reduce": Entry(at.Pulls(lj.local_sgd(1)), 1, True),
    "lsgd": Entry(at.Pulls(lj.lsgd(0.0, 0.1, PERIOD, PERIOD)), PERIOD, True),
    "diloco": Entry(at.Pulls(lj.diloco(PERIOD)), PERIOD, True),
    "overlapped-diloco": Entry(at.Pulls(lj.diloco(PERIOD, delay=DELAY))),
    "async-lsgd": Entry(at.LSGD(0.0, 0.1, PERIOD, PERIOD)),
    "async-adpsgd": Entry(at.ADPSGD(), 1),
    "async-diloco": Entry(at.DiLoCo(PERIOD)),
    "decoupled-diloco": Entry(at.DecoupledDiLoCo(PERIOD)),
}


# Scenarios


class Scenario(NamedTuple):
    """Speeds, and for each worker the seconds at which it fails and comes back."""

    speeds: at.Speeds
    drops: dict[int, list[float]] = {}
    joins: dict[int, list[float]] = {}

    def is_up(self, worker: int, now: float) -> bool:
        """Returns whether a worker is there at a time."""
        failed = sum(t <= now for t in self.drops.get(worker, ()))
        return failed == sum(t <= now for t in self.joins.get(worker, ()))


def leaving_and_joining(workers: int, seconds: float, seed: int) -> Scenario:
    """Returns failures at exponential intervals."""
    drops, joins = {}, {}
    for i in range(workers):
        random, now = np.random.default_rng([seed, i]), 0.0
        while (now := now + random.exponential(UP)) < seconds:
            drops.setdefault(i, []).append(now)
            joins.setdefault(i, []).append(now := now + random.exponential(DOWN))
    return Scenario(at.Speeds(STEP, jitter=0.1), drops, joins)


SCENARIOS: dict[str, Callable[[int, float, int], Scenario]] = {
    "uniform": lambda *_: Scenario(at.Speeds(STEP, jitter=0.1)),
    "one straggler": lambda *_: Scenario(at.Speeds(STEP, slow={1: 3.0}, jitter=0.1)),
    "heavy tail": lambda *_: Scenario(at.Speeds(STEP, lognormal=1.0)),
    "leaving and joining": leaving_and_joining,
}


# Training


@functools.cache
def task() -> small.Task:
    """Returns the classification of the digits."""
    return small.images(small.digits(), 64, 64)


@jax.jit
def step(params: Any, state: Any, own: Any, t: Any) -> Any:
    """Returns a worker's update; its own state is its key, learning rate and data."""
    key, rate, rows = own
    chosen = rows[jax.random.randint(jax.random.fold_in(key, t), (BATCH,), 0, len(rows))]
    batch = jnp.asarray(task().inputs)[chosen], jnp.asarray(task().labels)[chosen]
    loss, gradient = jax.value_and_grad(task().loss)(params, *batch, None)
    return jax.tree.map(lambda g: -rate * g, gradient), state, own, loss


def training(rate: float, seed: int, workers: int) -> at.Training:
    """Returns the training of all workers of a run."""
    first = task().start(jax.random.key(seed))
    key = jax.random.key(1000 + seed)
    rows = np.random.default_rng(seed).permutation(len(task().labels)).astype(np.int32)
    shards = rows[: len(rows) // workers * workers].reshape(workers, -1)
    own = lambda i: (jax.random.fold_in(key, i), jnp.float32(rate), jnp.asarray(shards[i]))
    return at.Training(lambda i: (first, (), own(i)), step)


test = functools.cache(lambda: task().tester())


# Runs


class Run(NamedTuple):
    """The measurements of a run.

    Attributes:
      seconds: of each test, [MOMENTS].
      errors: test errors of the mean of the present workers, in percent.
      megabytes: sent per worker until each test.
      goodput: in percent, see the file's docstring.
    """

    seconds: list[float]
    errors: list[float]
    megabytes: list[float]
    goodput: float

    def seconds_to(self, error: float) -> float:
        """Returns the seconds of the first test with at most this error."""
        reached = (s for s, e in zip(self.seconds, self.errors) if e <= error)
        return next(reached, math.inf)


class Watch:
    """Observes the workers of a run.

    Attributes:
      run: its tests so far.
      steps: taken by all workers.
      counts: each incarnation of a worker, with its count after its last step.
    """

    def __init__(self, scenario: Scenario, workers: int, seconds: float):
        self._scenario, self._workers = scenario, workers
        self._left = list(np.linspace(0, seconds, MOMENTS + 1)[1:])
        self._seen: dict[int, tuple[float, Any]] = {}
        self.run, self.steps = Run([], [], [], 0.0), 0
        self.counts: dict[at.Worker, int] = {}

    def __call__(self, worker: at.Worker) -> None:
        """Notes a step."""
        now = worker.transport.now()
        self.test_until(now)
        self._seen[worker.index] = now, worker.params
        self.counts[worker] = worker.count
        self.steps += 1

    def test_until(self, now: float) -> None:
        """Tests at all moments up to a time, before what happens then."""
        while self._left and self._left[0] <= now:
            moment = self._left.pop(0)
            self.run.seconds.append(float(moment))
            self.run.errors.append(self._error(moment))
            sent = sum(worker.transport.mailbox.bytes_sent for worker in self.counts)
            self.run.megabytes.append(sent / 1e6 / self._workers)

    def _error(self, moment: float) -> float:
        drops, is_up = self._scenario.drops, self._scenario.is_up
        here = [
            params
            for i, (seen, params) in self._seen.items()
            if is_up(i, moment) and not any(seen < t <= moment for t in drops.get(i, ()))
        ]
        if not here:
            return self.run.errors[-1] if self.run.errors else 100.0
        mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *jax.device_get(here))
        return test()(mean)


def measure(
    entry: Entry, make: Callable, workers: int, seconds: float, seed: int, rate: float
) -> Run:
    """Runs a method once."""
    scenario = make(workers, seconds, seed)
    size = 4 * sum(x.size for x in jax.tree.leaves(task().start(jax.random.key(0))))
    network = at.Network(size / TRANSFER, LATENCY)
    watch = Watch(scenario, workers, seconds)
    ideal = seconds / STEP
    outcome = at.simulator.run(
        training(rate, seed, workers),
        entry.method,
        nodes=workers,
        locals=1,
        steps=100 * round(ideal),
        network=network,
        speeds=scenario.speeds,
        seed=seed,
        timeout=TIMEOUT,
        drops=scenario.drops,
        joins=scenario.joins,
        collectives=entry.collectives,
        observe=watch,
        until=seconds,
    )
    watch.test_until(seconds)
    last = {w for w in outcome.workers if scenario.is_up(w.index, seconds)}
    lost = (count % entry.period for w, count in watch.counts.items() if w not in last)
    goodput = 100 * (watch.steps - sum(lost)) / (workers * ideal)
    return watch.run._replace(goodput=goodput)


def best_rate(entry: Entry, rates: Sequence[float], seconds: float) -> float:
    """Returns the rate with the lowest mean error over a run with uniform workers."""
    if len(rates) == 1:
        return rates[0]

    def mean_error(rate: float) -> float:
        uniform, setting = SCENARIOS["uniform"], (TUNING_WORKERS, seconds, TUNING_SEED)
        return statistics.mean(measure(entry, uniform, *setting, rate).errors)

    return min(rates, key=mean_error)


# Output


def row(runs: Sequence[Run], error: float) -> dict[str, str]:
    """Returns the columns of a method's runs."""
    reached = [run.seconds_to(error) for run in runs]
    missed = sum(map(math.isinf, reached))
    duration = spread(reached, 0) if not missed else f"{missed} of {len(runs)} do not"
    sent = statistics.mean(run.megabytes[-1] for run in runs)
    return {
        "test error, %": spread([run.errors[-1] for run in runs], 1),
        f"s to {error:g} %": duration,
        "MB sent per worker": f"{sent:.1f}",
        "goodput, %": spread([run.goodput for run in runs], 0),
    }


def draw(found: dict, scenarios: Sequence[str], path: pathlib.Path) -> None:
    """Draws the test errors over seconds and over MB, a column per scenario."""
    size, columns = (4 * len(scenarios), 7), len(scenarios)
    figure, axes = subplots(2, columns, figsize=size, sharey=True, squeeze=False)
    colors = dict(zip(METHODS, ["black", *plt.get_cmap("tab10").colors]))
    for scenario, (above, below) in zip(scenarios, axes.T):
        for name, each in found.items():
            runs = each[scenario]
            mean = lambda field, runs=runs: np.mean(
                [getattr(r, field) for r in runs], axis=0
            )
            style = "--" if METHODS[name].collectives else "-"
            style = {"color": colors[name], "label": name, "ls": style, "lw": 1.3}
            above.semilogy(mean("seconds"), mean("errors"), **style)
            below.loglog(mean("megabytes"), mean("errors"), **style)
        above.set(title=scenario, xlabel="simulated seconds")
        below.set(xlabel="MB sent per worker", xlim=(0.02, None))
    for left in axes[:, 0]:
        left.set_ylabel("test error of the mean, %")
    named = axes[0, 0].get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=5, frameon=False)
    save(figure, path)


def main(arguments: list[str]) -> int:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument("--workers", type=int, default=8)
    words.add_argument("--seconds", type=float, default=40.0, help="simulated seconds")
    words.add_argument("--error", type=float, default=4.0, help="the test error to reach")
    words.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.4, 0.8, 1.6])
    small.add_choices(words, METHODS, SCENARIOS)
    words.add_argument("--out", type=pathlib.Path, help="the folder for results")
    options, rates = words.parse_args(arguments), {}

    def prepare(method: str) -> Callable[[str, int], Run]:
        entry = METHODS[method]
        rate = rates[method] = best_rate(entry, options.rates, options.seconds)
        setting = options.workers, options.seconds
        return lambda name, seed: measure(entry, SCENARIOS[name], *setting, seed, rate)

    cells = lambda runs: row(runs, options.error)
    found = small.sweep(options, prepare, cells)
    for scenario in options.scenarios:
        rows = [
            {"method": name, "rate": f"{rates[name]:g}", **cells(runs[scenario])}
            for name, runs in found.items()
        ]
        print(f"{scenario}, {options.workers} workers\n\n{tables.markdown(rows)}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        kept = {
            method: {name: [run._asdict() for run in runs] for name, runs in each.items()}
            for method, each in found.items()
        }
        written = {"rates": rates, "runs": kept}
        (options.out / "staleness.json").write_text(json.dumps(written))
        draw(found, options.scenarios, options.out / "staleness.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
