"""python -m train.interconnect NAME: how long exchanges take, and the settings that suit.

    python -m train.interconnect cifar10-cnn7 --data.dir DIR --share 0.05

measures, on the devices of all processes, a training step of the experiment without any
exchange, and one exchange of its parameters (an all-reduce, as every pull is) inside the
node, across nodes, and among all workers. It proposes the periods at which LSGD's pulls
take no more than a share of a step; and for LSGD and DiLoCo in several wire formats the
settings with which no more than that share of the time is spent waiting: period, fragments,
and the delay that hides an exchange where it travels in the background. All options of
`python -m train` may follow; run it as the training would be run. Nothing is written.

    python -m train.interconnect cifar10-cnn7 --step-ms 30 --parameter-mb 4 \\
      --mbit 100 --latency-ms 1

plans for what is given, and measures what is not: the network is that among all workers.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import rich.console
import rich.table

import lsgd_jax as lj
from train import cli, compilation_cache
from train.arguments import Parser
from train.cluster import rendezvous
from train.cluster.exit_status import SUCCESS, WRONG_USAGE
from train.cluster.session import Session
from train.config import Config
from train.task import methods
from train.task.experiment import Experiment
from train.tools import plan


LEVELS = {
    "inside the node": ("local",),
    "across nodes": ("node",),
    "all workers": ("node", "local"),
}
STEPS, BLOCKS, EXCHANGES = 8, 3, 12
GIVEN = {
    "step-ms": "plan for a step of so many milliseconds",
    "parameter-mb": "plan for so many megabytes of float32 parameters",
    "mbit": "plan for links of so many Mbit/s among the workers",
    "latency-ms": "of an exchange of next to nothing there, with --mbit",
}


class Measurement(NamedTuple):
    """What was measured.

    Attributes:
      step: seconds of a training step without exchanges.
      payload: bytes that a worker sends in an exchange.
      exchanges: seconds of one exchange, by level; levels with one worker are left out.
      latencies: the same for four bytes.
      leaves: of the parameters.
      pulls: of each level the seconds of whole pulls, see `plan.Link`.
    """

    step: float
    payload: int
    exchanges: dict[str, float]
    latencies: dict[str, float]
    leaves: int = plan.MOST_FRAGMENTS
    pulls: Mapping[str, Mapping[tuple[str, str], float]] = {}


def period(exchange: float, step: float, share: float) -> int:
    """The smallest power of two τ with exchange / τ at most a share of a step.

    >>> period(exchange=0.080, step=0.1, share=0.05)
    16
    >>> period(exchange=0.001, step=0.1, share=0.05)
    1
    """
    return plan.power_of_two(exchange / (share * step))


def periods(measured: Measurement, share: float) -> tuple[int | None, int | None]:
    """LSGD's (local_period, global_period); None for a level that does not exist.

    Each of two levels gets half of the share; the global period is at least the local one.
    """
    inner, outer = (measured.exchanges.get(k) for k in ("inside the node", "all workers"))
    if "across nodes" not in measured.exchanges:
        outer = None  # one node: its leader is the leader of all
    return plan.periods(inner, outer, measured.step, share)


def links(
    measured: Measurement, nodes: int, locals: int
) -> tuple[plan.Link | None, plan.Link | None]:
    """Inside the node and among all; None for a level that does not exist."""

    def link(name: str, workers: int) -> plan.Link | None:
        if name not in measured.exchanges:
            return None
        seconds, latency = measured.exchanges[name], measured.latencies[name]
        found = plan.Link.of(seconds, latency, measured.payload, workers)
        return found._replace(measured=measured.pulls.get(name, {}))

    outer = link("all workers", nodes * locals) if nodes > 1 else None
    return link("inside the node", locals), outer


def measure(config: Config, session: Session) -> Measurement:
    """Measures an experiment on the devices of all processes."""
    config = dataclasses.replace(config, method=methods.make("independent"))
    experiment = Experiment(config, session=session)
    state = experiment.init()
    params = state.params
    payload = sum(x[0].size * x.dtype.itemsize for x in jax.tree.leaves(params))
    sizes = {"node": config.workers.nodes, "local": config.workers.locals}
    levels = {
        name: axes
        for name, axes in LEVELS.items()
        if all(sizes[axis] > 1 for axis in axes) or len(axes) == 2 and sizes["node"] > 1
    }
    tiny, workers = experiment.workers.replicate(jnp.zeros(1)), experiment.workers
    exchanges = {k: exchange_seconds(workers, params, v) for k, v in levels.items()}
    latencies = {k: exchange_seconds(workers, tiny, v) for k, v in levels.items()}
    whole = {"inside the node": True, "all workers": False}
    pulls = {
        name: pull_seconds(workers, params, is_node)
        for name, is_node in whole.items()
        if name in levels
    }
    leaves = len(jax.tree.leaves(params))
    step = _step(experiment, state)
    return Measurement(step, payload, exchanges, latencies, leaves, pulls)


def exchange_seconds(workers: lj.Workers, tree: Any, axes: tuple[str, ...]) -> float:
    """Seconds in which all workers of a group get the tree of its first worker."""
    first = lambda tree: lj.Group(axes).broadcast(tree, jnp.int32(0))
    take = workers.map(first)
    return _median(lambda: take(tree), EXCHANGES)


def pull_seconds(
    workers: lj.Workers, params: Any, is_node: bool
) -> dict[tuple[str, str], float]:
    """Seconds of whole pulls in the node, or of all workers, by kind and wire format."""
    axes = ("local",) if is_node else ("node", "local")
    pull = 0.1 if is_node else 0.0
    found: dict[tuple[str, str], float] = {}
    for wire in plan.WIRES:
        methods = {
            "leader": lj.lsgd(pull, 0.1 - pull, 1, 1, wire=wire),
            "mean": lj.diloco(1, axes=axes, wire=wire),
        }
        for kind, tx in methods.items():

            def step(params, state, tx=tx):
                no_move = jax.tree.map(jnp.zeros_like, params)
                updates, state = tx.update(no_move, state, params, value=jnp.float32(0))
                return lj.apply_updates(params, updates), state

            state = workers.map(tx.init)(params)
            once = functools.partial(workers.map(step), params, state)
            found[kind, wire] = _median(once, EXCHANGES // 2)
    return found


def _step(experiment: Experiment, state: Any) -> float:
    """Seconds of a training step among several without a pause."""
    batches = [experiment.batch(step) for step in range(STEPS)]

    def block():
        nonlocal state
        for step in range(STEPS):
            state, _ = experiment.step(state, experiment.data, batches[step])
        return state

    return _median(block, BLOCKS) / STEPS


def _median(work: Callable[[], Any], times: int) -> float:
    """The median of the seconds that something takes, without the compilation."""
    jax.block_until_ready(work())
    found = []
    for _ in range(times):
        began = time.perf_counter()
        jax.block_until_ready(work())
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def report(measured: Measurement, share: float, console: rich.console.Console) -> None:
    """Prints what was measured and the arithmetic from it to the periods."""
    table = rich.table.Table("exchange", "time, ms", "MB/s", "latency, ms")
    for name, seconds in measured.exchanges.items():
        rate = measured.payload / seconds / 1e6
        latency = 1e3 * measured.latencies[name]
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{rate:,.0f}", f"{latency:.2f}")
    megabytes, step = measured.payload / 1e6, 1e3 * measured.step
    console.print(
        f"parameters: {megabytes:.1f} MB; a step without exchanges: {step:.1f} ms"
    )
    if not measured.exchanges:
        console.print("one worker: there is no other worker to exchange anything with")
        return
    console.print(table)
    local, wide = periods(measured, share)
    options, costs = [], []
    for option, name, every in (
        ("local", "inside the node", local),
        ("global", "all workers", wide),
    ):
        if every is not None:
            options.append(f"--method.{option}-period {every}")
            costs.append((1e3 * measured.exchanges[name], every))
    cost = sum(ms / every for ms, every in costs)
    arithmetic = " + ".join(f"{ms:.2f} ms / {every}" for ms, every in costs)
    console.print(
        f"LSGD's pulls take {100 * cost / step:.1f} % of a step ({arithmetic} = "
        f"{cost:.2f} ms) with: {' '.join(options)}"
    )
    widest = 1e3 * list(measured.exchanges.values())[-1]
    console.print(
        f"all-reduce SGD, with an exchange at every step, would take "
        f"{(step + widest) / step:.2f} times as long as no exchange at all"
    )


def report_plan(
    inner: plan.Link | None,
    outer: plan.Link | None,
    step: float,
    payload: int,
    share: float,
    leaves: int,
    console: rich.console.Console,
) -> None:
    """Prints the proposals of `train.tools.plan`."""
    console.print(
        f"to wait for exchanges at most {100 * share:g} % of the time (in brackets: where "
        "they travel in the background, such a delay hides them):"
    )
    for found in plan.proposals(inner, outer, step, payload, share, leaves):
        console.print(
            f"{100 * found.share:4.1f} %, pauses of {1e3 * found.pause:.1f} ms (delay "
            f"{found.delay}: {100 * found.overlapped:.1f} %): {found.options}"
        )


def check_given(given: Mapping[str, float | None]) -> None:
    """Raises ValueError unless what to plan for is possible."""
    for name, value in given.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"`{name}` must be above 0, got {name}={value:g}")
    if (given["mbit"] is None) != (given["latency-ms"] is None):
        raise ValueError("`mbit` and `latency-ms` must be given together")


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; the exit status is 0, or 2 (wrong usage)."""
    session = Session()
    try:
        parser = Parser("python -m train.interconnect", __doc__)
        parser.add_argument("experiment", help="a named experiment, such as digits")
        parser.add_argument(
            "--share", type=float, default=0.05, help="of a step that pulls may take"
        )
        for name, help in GIVEN.items():
            parser.add_argument(f"--{name}", type=float, help=help)
        options, others = parser.parse_known_args(arguments)
        if not 0 < options.share < 1:
            raise ValueError(f"`share` must be in (0, 1), got share={options.share}")
        given = {name: getattr(options, name.replace("-", "_")) for name in GIVEN}
        check_given(given)
        config = cli.parse([options.experiment, *others])
        session = rendezvous.join(config)
        compilation_cache.use(say=session.is_main)
        is_known = None not in given.values()
        measured = None if is_known else measure(config, session)
    except ValueError as error:
        return session.leave(WRONG_USAGE, str(error))
    quiet = not session.is_main
    console = rich.console.Console(quiet=quiet, highlight=False, soft_wrap=True)
    nodes, locals = config.workers.nodes, config.workers.locals
    inner = outer = None
    step, payload, leaves = 0.0, 0, plan.MOST_FRAGMENTS
    if measured is not None:
        report(measured, options.share, console)
        inner, outer = links(measured, nodes, locals)
        step, payload, leaves = measured.step, measured.payload, measured.leaves
    if given["mbit"] is not None:
        wide = plan.Link.given(given["mbit"], given["latency-ms"], nodes * locals)
        inner, outer = (inner, wide) if nodes > 1 else (wide, None)
    step = step if given["step-ms"] is None else given["step-ms"] / 1e3
    if given["parameter-mb"] is not None:
        payload = round(1e6 * given["parameter-mb"])
        inner, outer = (link and link._replace(measured={}) for link in (inner, outer))
    if inner or outer:
        report_plan(inner, outer, step, payload, options.share, leaves, console)
    return SUCCESS
