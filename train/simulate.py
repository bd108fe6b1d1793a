"""python -m train.simulate NAME: methods under one network, in simulated time.

    python -m train.simulate digits --method lsgd --method.local-period 8 \\
      --method async-lsgd --method.local-period 8 --workers.nodes 16 \\
      --network ethernet-1g --step-ms 20 --slow 0 3 --steps 100 --out DIR

takes real training steps of all workers in this process, while a simulated clock decides
how long steps, messages and waits take. Options of a method, such as --method.wire, follow
its --method. All other options are those of `python -m train` and hold for all methods. DIR
gets `simulated.json`, `simulated.csv`, `simulated.png` and, for each method, a CSV of its
steps. The same seed gives the same numbers and times.
"""

import collections
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import lsgd_jax as lj
from train.config import methods
from train.config.schema import Config, WorkersConfig
from train.metrics import measures, progress, tables
from train.planning.unequal import Unequal
from train.process import command, compilation_cache
from train.process.exit_status import SUCCESS
from train.process.messages import counted
from train.run import cli
from train.task import asynchronous, schedules
from train.task.experiment import Experiment


OUTPUT = "simulated.json", "simulated.csv", "simulated.png"
STEP = "seconds", "worker", "step", "loss", "waited", "staleness"
BINS = 100  # intervals of simulated time in which losses are averaged


# Options


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions(Unequal):
    """Options of a simulation.

    Args:
      experiment: a named experiment, such as digits.
      network: the links between the nodes, such as ethernet-1g, wan-100m or free.
      mbit: bandwidth of a node's link in Mbit/s; overrides the network's.
      world: a published cluster, in place of --network, --step-ms and --slow: halos.
      parameters: number of parameters that messages stand for, if the experiment has fewer.
      latency_ms: latency between nodes; overrides the network's.
      inside_mbit: bandwidth of each worker's link inside its node, in Mbit/s.
      overhead_ms: time that software adds to each message of more than 4 KiB.
      coordinator_ms: time in which the coordinator serves a call.
      step_ms: mean time of a training step.
      loss: probability that a message is lost.
      out: the folder for results.
    """

    experiment: tyro.conf.Positional[str]
    network: str = "ethernet-1g"
    world: str | None = None
    parameters: float | None = None
    mbit: Annotated[float | None, tyro.conf.arg(aliases=["--bandwidth-mbit"])] = None
    latency_ms: float | None = None
    inside_mbit: float | None = None
    overhead_ms: float | None = None
    coordinator_ms: float | None = None
    step_ms: float = 10.0
    loss: float = 0.0
    out: pathlib.Path | None = None

    def links(self) -> lj.asynchronous.Network:
        """The network. Raises ValueError if it is unknown or a number is out of range."""
        asked = {
            "bandwidth": (self.mbit, 1e6 / 8),
            "latency": (self.latency_ms, 1e-3),
            "inside_bandwidth": (self.inside_mbit, 1e6 / 8),
            "overhead": (self.overhead_ms, 1e-3),
            "coordinator": (self.coordinator_ms, 1e-3),
        }
        changed: dict[str, Any] = {
            k: value * unit for k, (value, unit) in asked.items() if value is not None
        }
        network = lj.asynchronous.Network.named(self.network)
        if self.world is not None:
            network = self._published().network
        return dataclasses.replace(network, **changed)

    def paces(self) -> lj.asynchronous.Speeds:
        """The speeds of the workers. Raises ValueError if a number is out of range."""
        speeds = self.speeds(self.step_ms / 1e3)
        if self.world is None:
            return speeds
        published = self._published().speeds
        return dataclasses.replace(speeds, step=published.step, slow=published.slow)

    def _published(self) -> lj.asynchronous.World:
        worlds = lj.asynchronous.WORLDS
        if self.world not in worlds:
            known = ", ".join(worlds)
            raise ValueError(f"`world` must be one of {known}, got world={self.world!r}")
        return worlds[self.world]

    def check(self, grid: WorkersConfig) -> None:
        """Raises ValueError unless the options are valid for this grid of workers."""
        self.links(), self.paces()
        self.check_workers(grid.nodes * grid.locals)
        if self.world is not None:
            world = self._published()
            if (grid.nodes, grid.locals) != (world.nodes, world.locals):
                raise ValueError(
                    f"`world` has {world.nodes} nodes of {world.locals} workers, got "
                    f"workers.nodes={grid.nodes}, workers.locals={grid.locals}"
                )
        if self.parameters is not None and not 0 < self.parameters < math.inf:
            raise ValueError(
                f"`parameters` must be above 0, got parameters={self.parameters:g}"
            )
        lj.checks.check_fraction("loss", self.loss)
        taken = [x for x in OUTPUT if self.out is not None and (self.out / x).exists()]
        if taken:
            raise ValueError(
                f"`out` must be a folder without {taken[0]}, got out={self.out}"
            )


def parse(arguments: Sequence[str]) -> tuple[SimulateOptions, dict[str, Config]]:
    """Returns the options and each method's configuration; ValueError for wrong usage."""
    common, own = _segments(arguments)
    command = cli.Command("python -m train.simulate", SimulateOptions)
    options, others = cli.run_with_others(SimulateOptions, common, command.name, __doc__)
    configs: dict[str, Config] = {}
    for segment in own or [[]]:
        config = cli.parse([options.experiment, *others, *segment], command)
        chosen = config.method.name.replace(":", ".")
        name = chosen
        again = 2
        while name in configs:
            name = f"{chosen}-{again}"
            again = again + 1
        configs[name] = config
        method(config)
    for config in configs.values():
        options.check(config.workers)
    return options, configs


def _segments(arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Splits arguments into those for all methods, and those after each --method."""
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


def method(config: Config) -> lj.asynchronous.Method:
    """Returns the method as the simulator runs it.

    Raises:
      ValueError: the method cannot be simulated.
    """
    chosen = config.method
    optimizer = config.optimizer
    if chosen.is_asynchronous:
        rate = schedules.learning_rate(optimizer, config.steps)
        return chosen.asynchronous(rate, config.steps)
    if chosen.row.first is not None and chosen.name != "allreduce":
        raise ValueError(
            "`method` must not aggregate gradients other than by their mean (allreduce) "
            f"to be simulated, got method={chosen.name}"
        )
    if chosen.row.around is not None:
        raise ValueError(
            "`method` must not exchange the base optimizer's state to be simulated, got "
            f"method={chosen.name}"
        )
    is_plain = optimizer.name == "sgd" and optimizer.clip is None
    if chosen.name == "allreduce" and not is_plain:
        raise ValueError(
            "`optimizer.name` must be sgd without `optimizer.clip` to simulate "
            "allreduce, where the mean of the gradients is that of the parameters, "
            f"got optimizer.name={optimizer.name}, optimizer.clip={optimizer.clip}"
        )
    every = {"independent": config.steps + 1, "allreduce": 1}.get(chosen.name)
    if every is not None:
        return lj.asynchronous.Pulls(lj.exchange(lj.Pull(lj.rules.average(), 1.0, every)))
    if chosen.num_held_out:
        raise ValueError(
            "`method.held_out` must be 0 to be simulated, where training losses elect the "
            f"leader, got method.held_out={chosen.num_held_out}"
        )
    rate = schedules.learning_rate(optimizer, config.steps)
    exchange = chosen.exchanges(rate, config.steps)
    assert exchange is not None
    if any(pull.skips is not None for pull in exchange.pulls):
        raise ValueError(
            "`method` must compute a gradient at every step to be simulated, got "
            f"method={chosen.name}"
        )
    return lj.asynchronous.Pulls(exchange)


# Simulation


@dataclasses.dataclass
class Recorded:
    """A simulated run.

    Attributes:
      name: the name of the method.
      steps: the steps of all workers, ordered by time: `seconds` at its end, seconds that
        its worker has `waited` so far, `staleness` in steps of its last exchange.
      seconds: simulated seconds until the last worker ended.
      waited: seconds that each worker waited.
      bytes_sent: bytes that each worker sent.
      across: bytes that left each node.
      tested: the test result of the consensus at the end.
      wall: seconds that the simulation took.
    """

    name: str
    steps: list[dict[str, float]]
    seconds: float
    waited: list[float]
    bytes_sent: list[int]
    across: list[float]
    tested: dict[str, float]
    wall: float

    def summary(self) -> dict[str, Any]:
        """All but the steps, with derived values."""
        stale = collections.Counter(round(step["staleness"]) for step in self.steps)
        share = float(np.mean(self.waited)) / self.seconds if self.seconds else 0.0
        pace = 100 * self.seconds * len(self.waited) / max(len(self.steps), 1)
        derived = {"waiting": share, "per_100_steps": pace}
        kept = {name: value for name, value in vars(self).items() if name != "steps"}
        return {**kept, **derived, "staleness": dict(sorted(stale.items()))}

    def row(self) -> dict[str, Any]:
        """The row of this run in the table."""
        measure = measures.shown(self.tested)[0]
        derived = self.summary()
        stale = [step["staleness"] for step in self.steps] or [0]
        never = "" if any(self.bytes_sent) else tables.NEVER
        return {
            "method": self.name,
            "simulated s": f"{self.seconds:.4g}",
            "s / 100 steps": f"{derived['per_100_steps']:.4g}",
            "waiting, %": f"{100 * derived['waiting']:.1f}",
            "staleness, mean": f"{np.mean(stale):.2f}",
            "MB sent / worker": f"{np.mean(self.bytes_sent) / 1e6:.3g}{never}",
            measure.label: f"{self.tested[measure.key]:.{measure.digits}f}",
        }


def simulate(
    name: str, config: Config, options: SimulateOptions, training: Any
) -> Recorded:
    """Trains with one method in simulated time, and tests the consensus."""
    steps: list[dict[str, float]] = []
    began = time.perf_counter()

    def observe(worker: lj.asynchronous.Worker) -> None:
        step = (
            worker.transport.now(),
            worker.index,
            worker.count,
            worker.loss,
            worker.report.waited,
            worker.report.staleness,
        )
        steps.append(dict(zip(STEP, step)))

    network = options.links()
    if options.parameters is not None:
        size = sum(x.size for x in jax.tree.leaves(training.init(0)[0]))
        network = network.scaled(size / options.parameters)
    found = lj.asynchronous.simulator.run(
        training,
        method(config),
        config.workers.nodes,
        config.workers.locals,
        config.steps,
        network=network,
        speeds=options.paces(),
        seed=config.seed,
        timeout=options.timeout,
        loss=options.loss,
        drops=options.drop,
        joins=options.join,
        collectives=not config.method.is_asynchronous,
        observe=observe,
    )
    return Recorded(
        name,
        steps,
        found.seconds,
        waited=[worker.report.waited for worker in found.workers],
        bytes_sent=[worker.transport.mailbox.bytes_sent for worker in found.workers],
        across=found.sent.tolist(),
        tested=consensus(config, found.workers),
        wall=time.perf_counter() - began,
    )


def consensus(
    config: Config, workers: Sequence[lj.asynchronous.Worker]
) -> dict[str, float]:
    """Tests the mean of the parameters of all workers whose parameters are finite."""
    finite = [w for w in workers if np.isfinite(w.vector()).all()] or list(workers)

    def mean(*leaves):
        total = np.mean([np.asarray(x, np.float64) for x in leaves], 0)
        return jnp.asarray(total.astype(leaves[0].dtype)[None])

    params = jax.tree.map(mean, *(worker.params for worker in finite))
    stats = jax.tree.map(mean, *(worker.own.stats for worker in finite))
    grid = WorkersConfig(nodes=1, locals=1)
    one = dataclasses.replace(_alone(config), workers=grid, log_every=1)
    experiment = Experiment(one, warn=lambda text: None, devices=jax.devices()[:1])
    state = experiment.init()._replace(params=params, stats=stats)
    return experiment.test_center(state)


def _alone(config: Config) -> Config:
    """The configuration with the base optimizer alone."""
    alone = methods.make("independent")
    return dataclasses.replace(config, method=alone, ray=type(config.ray)())


# Output


def write(options: SimulateOptions, runs: list[Recorded], out: pathlib.Path) -> None:
    """Writes the results into a folder."""
    for run in runs:
        if run.steps:
            tables.write_csv(run.steps, out / f"{run.name}.csv")
    tables.write_csv([run.row() for run in runs], out / "simulated.csv")
    kept = {
        "network": dataclasses.asdict(options.links()),
        "speeds": dataclasses.asdict(options.paces()),
        "options": {k: getattr(options, k) for k in ("loss", "timeout", "drop", "join")},
        "methods": [run.summary() for run in runs],
    }
    (out / "simulated.json").write_text(json.dumps(kept, indent=2) + "\n")
    draw(runs, out / "simulated.png")


def draw(runs: list[Recorded], path: pathlib.Path) -> None:
    """Plots loss over simulated time, waiting by worker, staleness and bytes, as a PNG."""
    from train.metrics import drawing  # importing Matplotlib takes a second

    figure, grid = drawing.subplots(2, 2, figsize=(10, 7))
    (loss, waiting), (staleness, sent) = grid
    for run in runs:
        loss.plot(*_binned(run), label=run.name)
        share = 100 * np.divide(run.waited, run.seconds or 1)
        waiting.plot(share, marker=".", lw=0.8)
        count = run.summary()["staleness"]
        staleness.plot(list(count), list(count.values()), marker=".")
        sent.bar(run.name, float(np.mean(run.across)) / 1e6)
    loss.set(xlabel="simulated seconds", ylabel="training loss, mean of workers")
    loss.legend(frameon=False)
    waiting.set(xlabel="worker", ylabel="time spent waiting, %")
    staleness.set(xlabel="staleness, steps", ylabel="steps")
    for axes in (loss, staleness):
        axes.set_yscale("log")
        drawing.plain_numbers(axes.yaxis)
    drawing.whole_numbers(waiting.xaxis)
    drawing.whole_numbers(staleness.xaxis)
    sent.set_ylabel("MB that left a node, mean")
    sent.tick_params(axis="x", rotation=20)
    drawing.save(figure, path)


def _binned(run: Recorded) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, loss): the mean loss of the steps that ended in each time interval."""
    seconds, loss = ([step[key] for step in run.steps] for key in ("seconds", "loss"))
    count, edges = np.histogram(seconds, BINS, (0, run.seconds))
    total, _ = np.histogram(seconds, BINS, (0, run.seconds), weights=loss)
    return edges[1:][count > 0], total[count > 0] / count[count > 0]


@command.with_status
def main(arguments: Sequence[str]) -> int:
    """Simulates. Returns the exit status: 0, 1 (stopped by an error) or 2 (wrong usage)."""
    lj.tune_cpu()  # before jax uses a device
    options, configs = parse(arguments)
    compilation_cache.use(say=True)
    console = progress.console(soft_wrap=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    first = next(iter(configs.values()))
    warn = progress.Progress(first.steps).warn
    training = asynchronous.training(_alone(first), warn)
    runs = []
    for name, config in configs.items():
        found = simulate(name, config, options, training)
        runs.append(found)
        console.print(
            f"{name}: {counted(len(found.steps), 'step')} in {found.seconds:.4g} simulated "
            f"seconds; the simulation took {found.wall:.1f} s"
        )
    console.print(tables.markdown([found.row() for found in runs]), end="")
    if options.out is not None:
        write(options, runs, options.out)
        console.print(f"written: {options.out / OUTPUT[-1]} and the numbers beside it")
    return SUCCESS


if __name__ == "__main__":
    sys.exit(command.run(main))
