"""python -m train.plan NAME: proposes settings with which workers wait little.

    python -m train.plan cifar10-cnn7 --data.dir DIR --share 0.05

The command measures a training step of the experiment without exchanges, and exchanges of
its parameters inside a node, across nodes and among all workers, on the devices of all
processes. For LSGD and DiLoCo in several wire formats it proposes the shortest periods and
the fragments with which workers spend at most this share of the time waiting, and the delay
that hides an exchange in the background. All options of `python -m train` may follow. Start
the command as you would start the training. It writes no files.

    python -m train.plan digits --step-ms 30 --parameter-mb 4 --mbit 100 --latency-ms 1

plans for the given numbers and measures the others. The network is that of all workers.

    python -m train.plan text --topology v5p:4x4x4 --slices 2 --mbit 100000 --latency-ms 1

plans for a cluster that is not here: the seconds of a step are computed from the compiled
program and public figures of the chip (see `python -m train.compile`).
"""

import dataclasses
import functools
import math
import statistics
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import rich.console
import rich.table

import lsgd_jax as lj
from train import command, compilation_cache, compile
from train.cluster import rendezvous
from train.cluster.exit_status import SUCCESS, WRONG_USAGE
from train.cluster.session import Session
from train.config import Config
from train.metrics import progress
from train.task import methods
from train.task.experiment import Experiment


SCALE = 4 / lj.Wire().block  # bytes per parameter
# Bytes per parameter and messages per exchange of a wire format. Scales are a message.
WIRES: dict[lj.WireFormat, tuple[float, int]] = {
    "float32": (4.0, 1),
    "int8": (1.0 + SCALE, 2),
    "int4": (0.5 + SCALE, 2),
}
MOST_FRAGMENTS = 16
OVERHEAD = 0.1  # the share of an exchange that the latencies of fragments may add
STEPS, BLOCKS, EXCHANGES = 8, 3, 12  # numbers of measurements
INSIDE, ACROSS, ALL = "inside the node", "across nodes", "all workers"


# The network


class Link(NamedTuple):
    """The network of a group of workers whose exchanges are all-reduces.

    Attributes:
      latency: seconds of an exchange of one number.
      rate: bytes of parameters per second, in addition to the latency.
      workers: number of workers in the group.
      measured: seconds of whole pulls, including encoding and decoding, by kind ('leader'
        or 'mean') and wire format. Times that were not measured are computed.
    """

    latency: float
    rate: float
    workers: int
    measured: Mapping[tuple[str, str], float] = {}

    def seconds(self, kind: str, payload: int, wire: lj.WireFormat = "float32") -> float:
        """Seconds of a pull towards a leader, including the election, or towards a mean.

        With W workers, a worker receives 2 (W - 1) / W payloads in an all-reduce. Fewer
        bits need as many, in twice the messages.
        """
        if (kind, wire) in self.measured:
            return self.measured[kind, wire]
        waits = self.messages(kind, wire) + (kind == "leader")
        return waits * self.latency + payload / 4 * WIRES[wire][0] / self.rate

    def messages(self, kind: str, wire: lj.WireFormat) -> int:
        """Messages of a pull, one after the other. A mean in few bits takes two rounds."""
        by_shares = kind == "mean" and wire != "float32" and self.workers > 2
        return WIRES[wire][1] * (2 if by_shares else 1)


# The proposals


class Proposal(NamedTuple):
    """Settings of a method, and their cost.

    Attributes:
      options: the settings as command-line options.
      period: the number of steps after which the exchanges repeat.
      exchanges: (seconds, steps between two exchanges) of each kind of exchange.
      step: seconds of a step without exchanges.
    """

    options: str
    period: int
    exchanges: tuple[tuple[float, int], ...]
    step: float

    @property
    def pause(self) -> float:
        """Seconds of the longest wait."""
        return sum(seconds for seconds, _ in self.exchanges)

    @property
    def delay(self) -> int:
        """The steps that the exchanges take, less than the steps between two of them."""
        shortest = min(every for _, every in self.exchanges)
        return min(math.ceil(self.pause / self.step), shortest - 1)

    def share(self, delay: int = 0) -> float:
        """The share of the time spent waiting if exchanges overlap with `delay` steps."""
        left = ((max(0, x - delay * self.step), every) for x, every in self.exchanges)
        wait = sum(seconds / every for seconds, every in left)
        return wait / (self.step + wait)


class Setting(NamedTuple):
    """The training to plan for.

    Attributes:
      step: seconds of a training step without exchanges.
      payload: bytes of the parameters in float32.
      links: the network of each level; levels with one worker are left out.
      leaves: number of leaves of the parameters, the limit for the number of fragments.
    """

    step: float
    payload: int
    links: dict[str, Link]
    leaves: int = MOST_FRAGMENTS

    def proposals(self, share: float) -> Iterator[Proposal]:
        """Yields LSGD and DiLoCo in each wire format, which wait at most this share."""
        allowed = share / (1 - share) * self.step
        for method in (self._lsgd, self._diloco):
            yield from (method(allowed, wire) for wire in WIRES)

    def _lsgd(self, allowed: float, wire: lj.WireFormat) -> Proposal:
        """Each of two levels gets half the time. The outer period is not shorter.

        Without a second node both levels pull inside the node. A local pull of one worker
        costs nothing.
        """
        levels = self.links.get(INSIDE), self.links.get(ALL) or self.links[INSIDE]
        known = [link for link in levels if link is not None]
        exchanges, period = [], 1
        for link in known:
            seconds = link.seconds("leader", self.payload, wire)
            period = max(period, power_of_two(len(known) * seconds / allowed))
            exchanges.append((seconds, period))
        options = (
            f"--method lsgd --method.local-period {exchanges[0][1]} "
            f"--method.global-period {period} --method.wire {wire}"
        )
        return Proposal(options, period, tuple(exchanges), self.step)

    def _diloco(self, allowed: float, wire: lj.WireFormat) -> Proposal:
        """Latencies and leaves limit the number of fragments."""
        link = self.links.get(ALL) or self.links[INSIDE]
        whole = link.seconds("mean", self.payload, wire)
        more = link.messages("mean", wire) * link.latency
        fits = lambda count: (count - 1) * more <= OVERHEAD * whole
        most, fragments = min(self.leaves, MOST_FRAGMENTS), 1
        while 2 * fragments <= most and fits(2 * fragments):
            fragments *= 2
        total = whole + (fragments - 1) * more
        period = power_of_two(max(total / allowed, fragments))
        options = (
            f"--method diloco --method.period {period} --method.fragments {fragments} "
            f"--method.wire {wire}"
        )
        one = total / fragments, period // fragments
        return Proposal(options, period, (one,), self.step)


def power_of_two(least: float) -> int:
    """The smallest power of two that is at least 1 and at least `least`.

    >>> power_of_two(0.3), power_of_two(16), power_of_two(17)
    (1, 16, 32)
    """
    return 2 ** max(0, math.ceil(math.log2(least)))


# The measurement


def measure(config: Config, session: Session) -> Setting:
    """Measures an experiment on the devices of all processes."""
    config = dataclasses.replace(config, method=methods.make("independent"))
    experiment = Experiment(config, session=session)
    state, workers = experiment.init(), experiment.workers
    nodes, locals = config.workers.nodes, config.workers.locals
    groups = {
        INSIDE: (("local",), locals),
        ACROSS: (("node",), nodes),
        ALL: (("node", "local"), nodes * locals if nodes > 1 else 1),
    }
    links = {
        name: measure_link(workers, state.params, *group)
        for name, group in groups.items()
        if group[1] > 1
    }
    payload, leaves = _bytes(state.params), len(jax.tree.leaves(state.params))
    return Setting(_step(experiment, state), payload, links, leaves)


def computed(config: Config, pod: lj.aot.Pod) -> tuple[Setting, Config]:
    """Computes the step of an experiment on a cluster that is not here.

    Returns:
      The setting, without links, and the configuration with the workers of the cluster.
    """
    config = dataclasses.replace(config, method=methods.make("independent"))
    config = compile.on(config, pod)
    params = compile.parameters(config)
    report = compile.compiled(config, pod)
    (program,), payload = report.programs, sum(4 * x.size for x in params)
    seconds = report.seconds(program)
    if seconds is None:
        raise ValueError(f"the experiment does not fit into the memory of a device: {pod}")
    return Setting(seconds.step, payload, {}, len(params)), config


def measure_link(
    workers: lj.Workers, params: Any, axes: tuple[str, ...], count: int
) -> Link:
    """Measures exchanges in the groups of `count` workers along some mesh axes."""
    take = workers.map(lambda tree: lj.Group(axes).broadcast(tree, jnp.int32(0)))
    nothing = workers.replicate(jnp.zeros(1))
    seconds = _median(lambda: take(params), EXCHANGES)
    latency = min(_median(lambda: take(nothing), EXCHANGES), 0.99 * seconds)
    pulls = {} if axes == ("node",) else pull_seconds(workers, params, axes)
    return Link(latency, _bytes(params) / (seconds - latency), count, pulls)


def _bytes(params: Any) -> int:
    return sum(x[0].size * x.dtype.itemsize for x in jax.tree.leaves(params))


def pull_seconds(
    workers: lj.Workers, params: Any, axes: tuple[str, ...]
) -> dict[tuple[str, str], float]:
    """Measures whole pulls inside a node or among all workers, by kind and wire format."""
    inner, outer = (0.1, 0.0) if axes == ("local",) else (0.0, 0.1)
    found: dict[tuple[str, str], float] = {}
    for wire in WIRES:
        pulls = {
            "leader": lj.lsgd(inner, outer, 1, 1, wire=wire),
            "mean": lj.diloco(1, axes=axes, wire=wire),
        }
        for kind, tx in pulls.items():

            def step(params, state, tx=tx):
                no_move = jax.tree.map(jnp.zeros_like, params)
                updates, state = tx.update(no_move, state, params, value=jnp.float32(0))
                return lj.apply_updates(params, updates), state

            state = workers.map(tx.init)(params)
            once = functools.partial(workers.map(step), params, state)
            found[kind, wire] = _median(once, EXCHANGES // 2)
    return found


def _step(experiment: Experiment, state: Any) -> float:
    """Seconds per training step in a row of steps."""
    batches = [experiment.batch(step) for step in range(STEPS)]

    def block():
        nonlocal state
        for batch in batches:
            state, _ = experiment.step(state, experiment.data, batch)
        return state

    return _median(block, BLOCKS) / STEPS


def _median(work: Callable[[], Any], times: int) -> float:
    """Median of the seconds that a call takes, after one call that compiles."""
    wait = lambda: jax.block_until_ready(work())
    wait()
    return statistics.median(timeit.repeat(wait, number=1, repeat=times))


# The command


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(compile.Cluster):
    """The options of a plan.

    Args:
      share: share of the time that workers may wait for exchanges.
      step_ms: milliseconds of a step, in place of a measurement.
      parameter_mb: megabytes of float32 parameters, in place of those of the experiment.
      mbit: Mbit/s of the links among the workers, in place of a measurement.
      latency_ms: milliseconds of an exchange of one number, with --mbit.
    """

    share: float = 0.05
    step_ms: float | None = None
    parameter_mb: float | None = None
    mbit: float | None = None
    latency_ms: float | None = None

    def given(self) -> dict[str, float]:
        """Values that replace measurements; raises ValueError for wrong ones."""
        if not 0 < self.share < 1:
            raise ValueError(f"`share` must be in (0, 1), got share={self.share}")
        names = "step_ms", "parameter_mb", "mbit", "latency_ms"
        given = {k: x for k in names if (x := getattr(self, k)) is not None}
        for name, value in given.items():
            if not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be above 0, got {name}={value:g}")
        if ("mbit" in given) != ("latency_ms" in given):
            raise ValueError("`mbit` and `latency_ms` must be given together")
        if self.is_described and "mbit" not in given:
            raise ValueError(
                "`mbit` and `latency_ms` must be given for a cluster that is not here"
            )
        return given

    @property
    def is_described(self) -> bool:
        """Whether the plan is for a cluster that is not here."""
        return self.topology is not None or self.gpu is not None


def put(given: dict[str, float], setting: Setting, nodes: int, locals: int) -> Setting:
    """Replaces measurements by given values."""
    step, payload, links, leaves = setting
    if "mbit" in given:
        workers = nodes * locals  # a ring all-reduce sends 2 (W - 1) / W payloads
        rate = given["mbit"] * 1e6 / 8 * workers / (2 * max(workers - 1, 1))
        widest = Link(given["latency_ms"] / 1e3, rate, workers)
        links = links | {ALL if nodes > 1 else INSIDE: widest}
    if "parameter_mb" in given:
        payload = round(1e6 * given["parameter_mb"])
        links = {name: link._replace(measured={}) for name, link in links.items()}
    return Setting(given.get("step_ms", 1e3 * step) / 1e3, payload, links, leaves)


def report(setting: Setting, console: rich.console.Console) -> None:
    """Prints the measurements."""
    step, payload, links, _ = setting
    console.print(
        f"parameters: {payload / 1e6:.1f} MB; a step without exchanges: {1e3 * step:.1f} ms"
    )
    if not links:
        console.print("one worker: there are no exchanges to plan")
        return
    table = rich.table.Table("exchange", "time, ms", "MB/s", "latency, ms")
    seconds = 0.0
    for name, link in links.items():
        seconds = link.latency + payload / link.rate
        rate = f"{payload / seconds / 1e6:,.0f}"
        table.add_row(name, f"{1e3 * seconds:.2f}", rate, f"{1e3 * link.latency:.2f}")
    console.print(table)
    console.print(
        f"all-reduce SGD, with an exchange at every step, would take "
        f"{(step + seconds) / step:.2f} times as long as training without exchanges"
    )


def propose(setting: Setting, share: float, console: rich.console.Console) -> None:
    """Prints the proposals."""
    console.print(
        f"settings that wait at most {100 * share:g} % of the time for exchanges (in "
        "brackets: a delay that hides them in the background, and the share that is left):"
    )
    for found in setting.proposals(share):
        late = f"delay {found.delay}: {100 * found.share(found.delay):.1f} %"
        pauses = f"pauses of {1e3 * found.pause:.1f} ms ({late})"
        console.print(f"{100 * found.share():4.1f} %, {pauses}: {found.options}")


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; returns the exit status, 0 or 2 (wrong usage)."""
    session = Session()
    try:
        options, config = compile.parse(Options, arguments, __doc__)
        given = options.given()
        jax.config.update("jax_enable_preemption_service", False)  # SIGTERM ends the plan
        if not options.is_described:
            session = rendezvous.join(config)
        compilation_cache.use(say=session.is_main)
        is_known = len(given) == 4
        if is_known or not options.is_described:
            setting = Setting(0.0, 0, {}) if is_known else measure(config, session)
        else:
            setting, config = computed(config, options.pod())
    except (ValueError, ImportError) as error:
        return session.leave(WRONG_USAGE, str(error))
    quiet = not session.is_main
    console = progress.console(quiet=quiet, soft_wrap=True)
    if not is_known and not options.is_described:
        report(setting, console)
    setting = put(given, setting, config.workers.nodes, config.workers.locals)
    if options.is_described and not is_known:
        console.print(
            f"computed, not measured: parameters {setting.payload / 1e6:.1f} MB; a step "
            f"without exchanges {1e3 * setting.step:.3g} ms"
        )
    if setting.links:
        propose(setting, options.share, console)
    return SUCCESS


if __name__ == "__main__":
    sys.exit(command.run(main))
