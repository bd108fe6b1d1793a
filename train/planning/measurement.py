"""Measures a training step and exchanges of an experiment, or computes the step."""

import dataclasses
import functools
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import lsgd_jax as lj
from train import compile
from train.cluster.session import Session
from train.config import Config
from train.planning.candidates import WIRES
from train.planning.links import Link
from train.planning.setting import ACROSS, ALL, INSIDE, Setting
from train.task import methods
from train.task.experiment import Experiment


STEPS, BLOCKS, EXCHANGES = 8, 3, 12  # numbers of measurements


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
    return Setting(
        _bytes(state.params) / 4,
        links,
        step=_step(experiment, state),
        steps=config.steps,
        leaves=len(jax.tree.leaves(state.params)),
    )


def computed(config: Config, pod: lj.aot.Pod) -> tuple[Setting, Config, str]:
    """Computes the step of an experiment on a cluster that is not here.

    Returns:
      The setting, without links, the configuration with the workers of the cluster, and a
      sentence about the memory of a device.
    """
    config = dataclasses.replace(config, method=methods.make("independent"))
    config = compile.on(config, pod)
    params = compile.parameters(config)
    report = compile.compiled(config, pod)
    (program,), parameters = report.programs, sum(x.size for x in params)
    seconds = report.seconds(program)
    if seconds is None:
        raise ValueError(f"the experiment does not fit into the memory of a device: {pod}")
    assert pod.memory is not None and program.memory is not None
    used, most = program.memory.peak / 2**30, pod.memory / 2**30
    memory = f"HBM: {used:.3g} of {most:.3g} GiB of a device, without what a method keeps"
    step, steps = seconds.step, config.steps
    setting = Setting(parameters, {}, step=step, steps=steps, leaves=len(params))
    return setting, config, memory


def measure_link(
    workers: lj.Workers, params: Any, axes: tuple[str, ...], count: int
) -> Link:
    """Measures exchanges in the groups of `count` workers along some mesh axes."""
    take = workers.map(lambda tree: lj.Group(axes).broadcast(tree, jnp.int32(0)))
    nothing = workers.replicate(jnp.zeros(1))
    seconds = _median(lambda: take(params), EXCHANGES)
    latency = min(_median(lambda: take(nothing), EXCHANGES), 0.99 * seconds)
    pulls = {} if axes == ("node",) else pull_seconds(workers, params, axes)
    network = lj.asynchronous.Network.fitted(count, _bytes(params), seconds, latency)
    return Link(network, count, pulls)


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
