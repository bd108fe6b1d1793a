"""python -m train.simulate NAME: methods under one network, in simulated time.

    python -m train.simulate digits --method lsgd --method.local-period 8 \\
      --method async-lsgd --method.local-period 8 --nodes 16 --locals 8 \\
      --network ethernet-1g --step-ms 20 --slow 0:3x --steps 100 --out DIR

takes real training steps, of all workers in this process, while a simulated clock says how
long steps, messages and waits take. Options of a method stand behind its --method, as
--method.wire does. All other options are those of `python -m train` and hold for all.
DIR gets `simulated.json`, `simulated.csv`, `simulated.png` and of each method all its steps
as CSV. The same seed gives the same numbers and times.
"""

import collections
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

import lsgd_jax as lj
from train import cli, command, compilation_cache
from train.arguments import Parser
from train.cluster.exit_status import STOPPED, SUCCESS, WRONG_USAGE
from train.config import Config, WorkersConfig
from train.metrics import measures, tables
from train.plots import plt, tidy
from train.task import asynchronous, methods, schedules
from train.task.experiment import Experiment


REFUSED = "coordinate-median", "licm", "cge", "post-local-sgd"
OUTPUT = "simulated.json", "simulated.csv", "simulated.png"
BINS = 100  # of the simulated time, over which losses are averaged


class Step(NamedTuple):
    """One step of one worker, when it had ended.

    waited: seconds in all so far. staleness: of what it was last mixed with, in steps.
    """

    seconds: float
    worker: int
    step: int
    loss: float
    waited: float
    staleness: float


@dataclasses.dataclass
class Recorded:
    """A simulated run.

    Attributes:
      name: of the method.
      steps: of all workers, in the order of time.
      seconds: simulated, until the last worker had ended.
      waited: of each worker, seconds.
      bytes_sent: by each worker.
      across: bytes that left each node.
      tested: the consensus at the end.
      wall: seconds that the simulation took.
    """

    name: str
    steps: list[Step]
    seconds: float
    waited: list[float]
    bytes_sent: list[int]
    across: list[float]
    tested: dict[str, float]
    wall: float

    @property
    def per_100_steps(self) -> float:
        """Seconds per 100 steps of a worker."""
        return 100 * self.seconds * len(self.waited) / max(len(self.steps), 1)

    @property
    def waiting(self) -> float:
        """The share of the time that the workers waited."""
        return float(np.mean(self.waited)) / self.seconds if self.seconds else 0.0

    @property
    def staleness(self) -> dict[int, int]:
        """How many steps there were of each staleness, rounded to whole steps."""
        count = collections.Counter(round(step.staleness) for step in self.steps)
        return dict(sorted(count.items()))

    def row(self) -> dict[str, Any]:
        """Its row of the table."""
        measure = measures.shown(self.tested)[0]
        stale = [step.staleness for step in self.steps]
        return {
            "method": self.name,
            "simulated s": f"{self.seconds:.4g}",
            "s / 100 steps": f"{self.per_100_steps:.4g}",
            "waiting, %": f"{100 * self.waiting:.1f}",
            "staleness, mean": f"{np.mean(stale) if stale else 0:.2f}",
            "MB sent / worker": f"{np.mean(self.bytes_sent) / 1e6:.3g}",
            measure.label: f"{self.tested[measure.key]:.{measure.digits}f}",
        }

    def summary(self) -> dict[str, Any]:
        """What is kept of it as JSON."""
        kept = dataclasses.asdict(self)
        del kept["steps"]
        more = {"per_100_steps": self.per_100_steps, "waiting": self.waiting}
        return {**kept, **more, "staleness": self.staleness}

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, loss): the mean of the steps that ended in each part of the time."""
        seconds = np.array([step.seconds for step in self.steps])
        loss = np.array([step.loss for step in self.steps])
        edges = np.linspace(0, self.seconds, BINS + 1)
        place = np.clip(np.digitize(seconds, edges) - 1, 0, BINS - 1)
        count = np.bincount(place, minlength=BINS)
        with np.errstate(invalid="ignore"):
            mean = np.bincount(place, weights=loss, minlength=BINS) / count
        return edges[1:][count > 0], mean[count > 0]


def draw(runs: list[Recorded], path: pathlib.Path) -> None:
    """Loss against simulated seconds, waiting by worker, staleness and bytes, as a PNG."""
    figure, grid = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    (loss, waiting), (staleness, sent) = grid
    for run in runs:
        loss.plot(*run.curve(), label=run.name)
        share = np.divide(run.waited, run.seconds or 1)
        waiting.plot(100 * share, marker=".", lw=0.8, label=run.name)
        count = run.staleness
        staleness.plot(list(count), list(count.values()), marker=".", label=run.name)
    names = [run.name for run in runs]
    across = [float(np.mean(run.across)) / 1e6 for run in runs]
    sent.bar(names, across)
    loss.set(xlabel="simulated seconds", ylabel="training loss, mean of workers")
    loss.set_yscale("log")
    loss.legend(frameon=False)
    waiting.set(xlabel="worker", ylabel="time spent waiting, %")
    staleness.set(xlabel="staleness, steps", ylabel="steps")
    staleness.set_yscale("log")
    sent.set_ylabel("MB that left a node, mean")
    sent.tick_params(axis="x", rotation=20)
    tidy(figure).savefig(path, dpi=120)
    plt.close(figure)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be simulated.

    Attributes:
      configs: of each method by the name that it has in the results.
      network, speeds: see `lj.asynchronous`.
      options: what `lj.asynchronous.simulator.run` is given besides.
      out: the folder for results, or None.
    """

    configs: dict[str, Config]
    network: lj.asynchronous.Network
    speeds: lj.asynchronous.Speeds
    options: dict[str, Any]
    out: pathlib.Path | None


def parse(arguments: Sequence[str]) -> Plan:
    """What the command line asks for.

    Raises:
      ValueError: what cannot be understood, or is not possible.
    """
    parser = _parser()
    common, own = _segments(arguments)
    options, others = parser.parse_known_args(common)
    grid = [f"--workers.{k}={v}" for k, v in _grid(options).items() if v is not None]
    configs: dict[str, Config] = {}
    for segment in own or [[]]:
        config = cli.parse([options.experiment, *others, *grid, *segment])
        name, again = config.method.name, 2
        while name in configs:
            name, again = f"{config.method.name}-{again}", again + 1
        configs[name] = config
    for config in configs.values():
        method(config)
    workers = config.workers.nodes * config.workers.locals
    slow = _of_workers("slow", options.slow, workers, unit="x")
    drops = _of_workers("drop", options.drop, workers, unit="s")
    joins = _of_workers("join", options.join, workers, unit="s")
    often, stall = _pair("stall", options.stall or "0:0", "PROBABILITY:MILLISECONDS")
    noise = options.jitter, options.lognormal, often, stall / 1e3
    speeds = lj.asynchronous.Speeds(options.step_ms / 1e3, slow, *noise)
    if not options.timeout > 0:
        raise ValueError(f"`timeout` must be positive, got timeout={options.timeout}")
    lj.checks.check_fraction("loss", options.loss)
    given = dict(loss=options.loss, timeout=options.timeout, drops=drops, joins=joins)
    out = None if options.out is None else pathlib.Path(options.out)
    if out is not None and (taken := [x for x in OUTPUT if (out / x).exists()]):
        raise ValueError(f"`out` must be a folder without {taken[0]}, got out={out}")
    return Plan(configs, _network(options), speeds, given, out)


def _parser() -> Parser:
    parser = Parser("python -m train.simulate", __doc__)
    add = parser.add_argument
    add("experiment", help="a named experiment, such as digits")
    add("--nodes", type=int, help="nodes of the cluster")
    add("--locals", type=int, help="workers of each node")
    known = ", ".join(lj.asynchronous.NETWORKS)
    add("--network", default="ethernet-1g", help=f"between the nodes: {known}")
    add("--bandwidth-mbit", type=float, help="of a node's link, instead of the network's")
    add("--latency-ms", type=float, help="from node to node, instead of the network's")
    add("--inside-mbit", type=float, help="of each worker's link inside its node")
    add("--overhead-ms", type=float, help="of software around each message")
    add("--coordinator-ms", type=float, help="in which the coordinator serves a call")
    add("--step-ms", type=float, default=10.0, help="mean time of a training step")
    add("--slow", action="append", default=[], metavar="WORKER:FACTOR", help="e.g. 0:3x")
    add("--jitter", type=float, default=0.0, help="uniform noise of steps, in [0, 1]")
    add("--lognormal", type=float, default=0.0, help="sigma of log-normal noise")
    add("--stall", metavar="PROBABILITY:MS", help="of a step to take so much longer")
    add("--drop", action="append", default=[], metavar="WORKER:SECONDS", help="is lost")
    add("--join", action="append", default=[], metavar="WORKER:SECONDS", help="comes")
    add("--loss", type=float, default=0.0, help="probability of a message to be lost")
    add("--timeout", type=float, default=60.0, help="seconds to wait for a worker")
    add("--out", help="the folder for results")
    return parser


def _grid(options: Any) -> dict[str, int | None]:
    return {"nodes": options.nodes, "locals": options.locals}


def _segments(arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The options that all methods share, and those of each method behind its name."""
    common: list[str] = []
    own: list[list[str]] = []
    goes_on = common
    for argument in arguments:
        option = argument.partition("=")[0]
        if option == "--method":
            own.append([])
            goes_on = own[-1]
        elif argument.startswith("--"):
            is_own = option.startswith(("--method.", "--ray."))
            goes_on = own[-1] if is_own and own else common
        goes_on.append(argument)
    return common, own


def _of_workers(name: str, given: list[str], workers: int, unit: str) -> dict[int, float]:
    found = {}
    for text in given:
        worker, value = _pair(name, text.removesuffix(unit), f"WORKER:NUMBER{unit}")
        if worker not in range(workers):
            raise ValueError(
                f"`{name}` must name a worker from 0 to {workers - 1}, got {name}={text}"
            )
        if value < 0:
            raise ValueError(f"`{name}` must not be negative, got {name}={text}")
        found[int(worker)] = value
    return found


def _pair(name: str, text: str, form: str) -> tuple[float, float]:
    try:
        first, second = map(float, text.split(":"))
    except ValueError:
        raise ValueError(f"`{name}` must be {form}, got {name}={text}") from None
    return first, second


def _network(options: Any) -> lj.asynchronous.Network:
    network = lj.asynchronous.Network.named(options.network)
    asked = {
        "bandwidth": (options.bandwidth_mbit, 1e6 / 8),
        "latency": (options.latency_ms, 1e-3),
        "inside_bandwidth": (options.inside_mbit, 1e6 / 8),
        "overhead": (options.overhead_ms, 1e-3),
        "coordinator": (options.coordinator_ms, 1e-3),
    }
    changed = {k: value * unit for k, (value, unit) in asked.items() if value is not None}
    return dataclasses.replace(network, **changed)


def method(config: Config) -> lj.asynchronous.Method:
    """What the workers do besides their own steps.

    Raises:
      ValueError: a method that cannot be simulated.
    """
    chosen, optimizer = config.method, config.optimizer
    if chosen.is_asynchronous:
        return chosen.asynchronous()
    if chosen.name in REFUSED:
        raise ValueError(
            f"`method` must not aggregate gradients but by their mean (allreduce) to be "
            f"simulated, got method={chosen.name}"
        )
    if chosen.name == "independent":
        return lj.asynchronous.Pulls(_means(every=config.steps + 1))
    if chosen.name == "allreduce":
        if optimizer.name != "sgd" or optimizer.clip is not None:
            raise ValueError(
                "`optimizer.name` must be sgd without `optimizer.clip` to simulate "
                "allreduce, where the mean of the gradients is that of the parameters, "
                f"got optimizer.name={optimizer.name}, optimizer.clip={optimizer.clip}"
            )
        return lj.asynchronous.Pulls(_means(every=1))
    exchange = chosen.exchanges(schedules.learning_rate(optimizer, config.steps))
    assert exchange is not None
    return lj.asynchronous.Pulls(exchange)


def _means(every: int) -> lj.Exchange:
    return lj.exchange(lj.Pull(lj.average(), 1.0, every))


def simulate(name: str, config: Config, plan: Plan, training: Any) -> Recorded:
    """Trains with one method in simulated time, and tests the consensus."""
    steps: list[Step] = []
    began = time.perf_counter()

    def observe(worker: lj.asynchronous.Worker) -> None:
        now, report = worker.transport.now(), worker.report
        step = worker.index, worker.count, worker.loss, report.waited, report.staleness
        steps.append(Step(now, *step))

    found = lj.asynchronous.simulator.run(
        training,
        method(config),
        config.workers.nodes,
        config.workers.locals,
        config.steps,
        plan.network,
        plan.speeds,
        config.seed,
        collectives=not config.method.is_asynchronous,
        observe=observe,
        **plan.options,
    )
    waited = [worker.report.waited for worker in found.workers]
    sent = [worker.transport.mailbox.bytes_sent for worker in found.workers]
    tested = consensus(config, found.workers)
    wall = time.perf_counter() - began
    across = found.sent.tolist()
    return Recorded(name, steps, found.seconds, waited, sent, across, tested, wall)


def consensus(
    config: Config, workers: Sequence[lj.asynchronous.Worker]
) -> dict[str, float]:
    """The test of the mean of the workers' parameters that are finite."""
    mean = lambda *leaves: np.mean([np.asarray(x, np.float64) for x in leaves], 0)
    finite = [w for w in workers if np.isfinite(w.vector()).all()] or list(workers)
    params, stats = (
        jax.tree.map(lambda *x: mean(*x).astype(x[0].dtype)[None], *trees)
        for trees in ([w.params for w in finite], [w.own.stats for w in finite])
    )
    one = dataclasses.replace(
        _alone(config), workers=WorkersConfig(nodes=1, locals=1), log_every=1
    )
    experiment = Experiment(one, warn=lambda text: None, devices=jax.devices()[:1])
    state = experiment.init()
    return experiment.test_center(
        state._replace(
            params=jax.tree.map(jnp.asarray, params), stats=jax.tree.map(jnp.asarray, stats)
        )
    )


def _alone(config: Config) -> Config:
    """The same with the base optimizer alone."""
    alone = methods.make("independent")
    return dataclasses.replace(config, method=alone, ray=type(config.ray)())


def run(plan: Plan, console: rich.console.Console) -> None:
    """Simulates all methods, prints and writes what was found."""
    if plan.out is not None:
        plan.out.mkdir(parents=True, exist_ok=True)
    config = next(iter(plan.configs.values()))
    training = asynchronous.training(_alone(config), warn=console.print)
    runs = []
    for name, config in plan.configs.items():
        runs.append(found := simulate(name, config, plan, training))
        console.print(
            f"{name}: {len(found.steps)} steps in {found.seconds:.4g} simulated seconds; "
            f"the simulation took {found.wall:.1f} s"
        )
    rows = [found.row() for found in runs]
    console.print(tables.markdown(rows), end="")
    if plan.out is not None:
        write(plan, runs, rows)
        console.print(f"written: {plan.out / 'simulated.png'} and the numbers beside it")


def write(plan: Plan, runs: list[Recorded], rows: tables.Rows) -> None:
    """Writes the results into the plan's folder."""
    assert plan.out is not None
    for found in runs:
        steps = [step._asdict() for step in found.steps]
        if steps:
            tables.write_csv(steps, plan.out / f"{found.name}.csv")
    tables.write_csv(rows, plan.out / "simulated.csv")
    kept = {
        "network": dataclasses.asdict(plan.network),
        "speeds": dataclasses.asdict(plan.speeds),
        "options": plan.options,
        "methods": [found.summary() for found in runs],
    }
    (plan.out / "simulated.json").write_text(json.dumps(kept, indent=2) + "\n")
    draw(runs, plan.out / "simulated.png")


def main(arguments: Sequence[str]) -> int:
    """Simulates; the exit status is 0, 1 (stopped by an error) or 2 (wrong usage)."""
    lj.tune_cpu()  # before jax uses a device
    try:
        plan = parse(arguments)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE
    compilation_cache.use(say=True)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    try:
        run(plan, console)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE if isinstance(error, ValueError) else STOPPED
    return SUCCESS


if __name__ == "__main__":
    sys.exit(command.run(main))
