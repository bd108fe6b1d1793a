"""Measures a training step and exchanges of an experiment, or computes the step."""

import dataclasses
import functools
import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import lsgd_jax as lj
from train import compile
from train.cluster.session import Session
from train.config import methods
from train.config.schema import Config
from train.planning.candidates import WIRES
from train.planning.links import Link
from train.planning.scenario import ACROSS, ALL, INSIDE, KNOWN, Scenario
from train.task.experiment import Experiment


# Numbers of measurements.
STEPS = 8
BLOCKS = 3
EXCHANGES = 12
FEW = 100  # floats of a message that costs only its latency; gloo sends fewer in other ways


def measure(config: Config, session: Session) -> Scenario:
    """Measures an experiment on the devices of all processes."""
    config = dataclasses.replace(config, method=methods.make("independent"))
    experiment = Experiment(config, session=session)
    state = experiment.init()
    nodes = config.workers.nodes
    locals = config.workers.locals
    groups = {
        INSIDE: (("local",), locals),
        ACROSS: (("node",), nodes),
        ALL: (("node", "local"), nodes * locals if nodes > 1 else 1),
    }
    links = {
        name: measure_link(experiment.workers, state.params, axes, count)
        for name, (axes, count) in groups.items()
        if count > 1
    }
    return Scenario(
        _bytes(state.params) / 4,
        links,
        step=_step(experiment, state),
        steps=config.steps,
        leaves=len(jax.tree.leaves(state.params)),
    )


def computed(config: Config, pod: lj.aot.Pod) -> tuple[Scenario, Config, list[str]]:
    """Computes the step of an experiment on a cluster that is not here.

    Returns:
      The scenario, without links, the configuration with the workers of the cluster, and
      sentences about the memory of a device and what a delay hides.
    """
    config = dataclasses.replace(config, method=methods.make("independent"))
    config = compile.on(config, pod)
    params = compile.parameters(config)
    report = compile.compiled(config, pod)
    (program,) = report.programs
    seconds = report.seconds(program)
    if seconds is None:
        raise ValueError(f"the experiment does not fit into the memory of a device: {pod}")
    assert pod.memory is not None and program.memory is not None
    used = program.memory.peak / 2**30
    most = pod.memory / 2**30
    notes = [f"HBM: {used:.3g} of {most:.3g} GiB of a device, without what a method keeps"]
    hides = {}
    for choice in delayed(config, pod).choices:
        share = hidden(choice)
        hides[choice.settings["wire"] != WIRES[0]] = share
        notes.append(_note(choice, share))
    scenario = Scenario(
        sum(x.size for x in params),
        {},
        step=seconds.step,
        steps=config.steps,
        leaves=len(params),
        hides=hides,
    )
    return scenario, config, notes


def _note(choice: lj.aot.Choice, share: float) -> str:
    report = choice.report
    if not report.fits or report.hbm is None:
        return f"DiLoCo, {choice.name}: does not fit into the memory of a device"
    used = f"{report.hbm / 2**30:.3g} GiB of HBM"
    why = ""
    if share < 0.995 and choice.reason:
        why = f": {choice.reason}"
    return f"DiLoCo, {choice.name}: {used}, hides {100 * share:.0f} % of a step{why}"


def delayed(config: Config, pod: lj.aot.Pod) -> lj.aot.Plan:
    """Compiles DiLoCo with a delay of one step, in float32 and in few bits."""
    configs = {}

    def method(**settings: Any) -> Any:
        chosen = methods.make("diloco", period=KNOWN[0], **settings)
        made = chosen.exchanges(1.0)
        configs[made] = dataclasses.replace(config, method=chosen)
        return made

    def compiled(made: Any, phases: Sequence[lj.Phase]) -> lj.aot.Report:
        return compile.compiled(configs[made], pod, phases=phases)

    return lj.aot.plan(compiled, method, wire=WIRES[:2], delay=[1])


def hidden(choice: lj.aot.Choice) -> float:
    """The share of a step's products beside the messages of a choice, by their bytes."""
    if not choice.report.fits:
        return 0.0
    sent = 0.0
    beside = 0.0
    for program in choice.report.programs:
        for each in program.collectives:
            if each.crosses:
                nbytes = each.times * each.across
                sent += nbytes
                beside += nbytes * program.beside(each)
    return beside / sent if sent else 1.0


def measure_link(
    workers: lj.Workers, params: Any, axes: tuple[str, ...], count: int
) -> Link:
    """Measures exchanges in the groups of `count` workers along some mesh axes."""
    take = workers.map(lambda tree: lj.rules.Group(axes).broadcast(tree, jnp.int32(0)))
    few = workers.replicate(jnp.zeros(FEW))
    seconds = _median(lambda: take(params), EXCHANGES)
    latency = min(_median(lambda: take(few), EXCHANGES), 0.99 * seconds)
    pulls = {} if axes == ("node",) else pull_seconds(workers, params, axes)
    network = lj.asynchronous.Network.fitted(count, _bytes(params), seconds, latency)
    return Link(network, count, pulls)


def _bytes(params: Any) -> int:
    return sum(x[0].size * x.dtype.itemsize for x in jax.tree.leaves(params))


def pull_seconds(
    workers: lj.Workers, params: Any, axes: tuple[str, ...]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Measures pulls inside a node or among all workers, see `Link.measured`."""
    # Only one of LSGD's two pulls communicates.
    is_inside = axes == ("local",)
    inner = 0.1 if is_inside else 0.0
    outer = 0.0 if is_inside else 0.1
    few = workers.replicate(jnp.zeros(FEW))
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for wire in WIRES:
        pulls = {
            "leader": lj.lsgd(inner, outer, 1, 1, wire=wire),
            "mean": lj.diloco(1, axes=axes, wire=wire),
        }
        for kind, tx in pulls.items():
            found[kind, wire] = _pull(workers, tx, few), _pull(workers, tx, params)
    return found


def _pull(workers: lj.Workers, tx: lj.Exchange, params: Any) -> float:
    """Seconds of a step in which all workers pull and nothing else."""

    def step(params, state):
        no_move = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(no_move, state, params, value=jnp.float32(0))
        return lj.apply_updates(params, updates), state

    once = functools.partial(workers.map(step), params, workers.map(tx.init)(params))
    return _median(once, EXCHANGES // 2)


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

    def wait():
        jax.block_until_ready(work())

    wait()
    return statistics.median(timeit.repeat(wait, number=1, repeat=times))
