"""python -m train.compile NAME: compiles an experiment for a pod that is not here.

    python -m train.compile text --topology v5e:4x4 --slices 2 --workers.inside fsdp=16 \
      --batch-size 16
    python -m train.compile text --chips v5e:4x8 --sites 2
    python -m train.compile digits --gpu h100 --hosts 4 --each 8

The command prints for each phase of the method the memory per device, the bytes inside and
across slices or hosts, and computed seconds. No accelerator is needed, but the extra `tpu`
or `gpu-compile` of lsgd_jax. All options of `python -m train` may follow. Nodes are the
slices or hosts; each has as many workers as its devices hold.

The exit status is 1 if a program does not fit into the memory of a device.
"""

import dataclasses
import functools
import math
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro

import lsgd_jax as lj
from train.cluster.session import Session
from train.config.schema import Config
from train.process import command
from train.process.exit_status import STOPPED, SUCCESS
from train.process.messages import plain
from train.run import cli
from train.task import inside, schedules
from train.task.asynchronous import Place
from train.task.experiment import Task
from train.task.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster that is not here.

    Args:
      chips: kind and number of all chips, such as v5e:16x16 or h100:64.
      sites: number of slices or hosts with GPUs that share `chips` evenly.
      topology: generation and shape of a TPU slice, such as v5e:4x4.
      slices: number of slices.
      gpu: kind of GPU, in place of a topology: a100, h100, h200 or b200.
      hosts: number of hosts with GPUs.
      each: number of GPUs in a host.
    """

    chips: str | None = None
    sites: int | None = None
    topology: str | None = None
    slices: int = 1
    gpu: str | None = None
    hosts: int = 1
    each: int = 8

    def pod(self) -> lj.aot.Pod:
        """The described cluster.

        Raises:
          ValueError: no kind or several, or one that is not known. ImportError: a package
            is missing.
        """
        if [self.chips, self.topology, self.gpu].count(None) != 2:
            raise ValueError("one of `chips`, `topology` and `gpu` must be given")
        if self.chips is not None:
            chip, shape = self.shared()
            sites = self.sites or 1
            if chip.kind.startswith("NVIDIA"):
                return lj.aot.gpu(chip.name, sites, math.prod(shape) // sites)
            return lj.aot.tpu(f"{chip.name}:{'x'.join(map(str, cut(shape, sites)))}", sites)
        if self.topology is not None:
            return lj.aot.tpu(self.topology, self.slices)
        assert self.gpu is not None
        return lj.aot.gpu(self.gpu, self.hosts, self.each)

    def shared(self) -> tuple[lj.aot.Chip, tuple[int, ...]]:
        """The kind and the shape of the given chips.

        Raises:
          ValueError: an unknown kind, or chips that the sites cannot share.
        """
        text = self.chips or ""
        sites = 1 if self.sites is None else self.sites
        kind, _, shape = text.partition(":")
        if not re.fullmatch(r"\w+:\d+(x\d+)*", text):
            raise ValueError(
                f"`chips` must be such as v5e:16x16 or h100:64, got chips={text}"
            )
        chip = lj.aot.chip(kind)
        sizes = tuple(map(int, shape.split("x")))
        count = math.prod(sizes)
        if count < 2:
            raise ValueError(f"`chips` must be at least 2, got chips={text}")
        if not 1 <= sites <= count:
            raise ValueError(
                f"`sites` must be from 1 to the {count} chips, got sites={sites}"
            )
        if count % sites:
            raise ValueError(f"`sites` must divide the {count} chips, got sites={sites}")
        return chip, sizes


def cut(shape: Sequence[int], sites: int) -> list[int]:
    """The shape of each of some equal parts, cut along the longest sides.

    >>> cut((16, 16), 4), cut((4, 4, 8), 2)
    ([8, 8], [4, 4, 4])
    """
    left = list(shape)
    while sites > 1:
        prime = next(x for x in range(2, sites + 1) if sites % x == 0)
        sides = [i for i, size in enumerate(left) if size % prime == 0]
        left[max(sides, key=lambda i: left[i])] //= prime
        sites //= prime
    return left


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions(Cluster):
    """The options of a compilation.

    Args:
      experiment: a named experiment, such as text.
      mbit: Mbit/s of a host to other slices or hosts. Defaults to the public figure of the
        chip.
      gbit: the same in Gbit/s.
      efficiency: share of the chip's peak at which a step computes. Defaults to that of
        published runs on the chip.
      json: file for the report.
      figure: file for a figure of the seconds.
    """

    experiment: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    mbit: float | None = None
    gbit: float | None = None
    efficiency: float | None = None
    json: pathlib.Path | None = None
    figure: pathlib.Path | None = None


def task_of(config: Config, warn: Callable[[str], None]) -> Task:
    """The training of one worker, with the shapes of its data in place of the data."""
    shapes = functools.partial(jax.eval_shape, lambda tree: tree)
    place = Place(0, config.workers.nodes * config.workers.locals, {}, put=shapes)
    return Task(config, None, place, warn, Session())


def compiled(
    config: Config,
    pod: lj.aot.Pod,
    bandwidth: float | None = None,
    efficiency: float | None = None,
    phases: Sequence[lj.Phase] | None = None,
) -> lj.aot.Report:
    """Compiles the step of an experiment on all devices of a cluster.

    Args:
      config: the experiment.
      pod: the cluster.
      bandwidth, efficiency, phases: as for `lj.aot.report`.

    Raises:
      ValueError: a worker's devices do not divide those of a slice or host; an asynchronous
        method; see `Task`.
    """
    if config.method.is_asynchronous:
        raise ValueError(
            f"`method` must run in lock step, got {config.method.name}: its workers are "
            "separate programs"
        )
    config = on(config, pod)
    axes = config.workers.axes
    locals = config.workers.locals
    sizes: dict[str, Any] = {"node": pod.groups, "local": locals, **axes}
    mesh = pod.mesh(**sizes)
    workers = lj.Workers(mesh=mesh, axes=("node", "local"))
    task = task_of(config, warn=lambda text: print(plain(text), file=sys.stderr))
    source = task.forward.source
    batch = task.data, next(iter(source.batches(range(1))))

    def init() -> tuple:
        key = jax.random.key(config.seed)
        start = task.forward.init(key)
        params = start.pop("params")
        step = lj.Shared(jnp.zeros([], jnp.int32))
        return tuple(TrainState(params, start, task.tx.init(params), key, step))

    def train_step(*carry: Any, phase: lj.Phase | None = None) -> tuple:
        *state, (data, batch) = carry
        before = TrainState(*state)
        if phase is None or phase.needs_gradient:
            after, result = task.step(before, data, batch, phase)
        else:
            after, result = task.skip(before, phase)
        return (*after, result)

    rate = schedules.learning_rate(config.optimizer, config.steps)
    return lj.aot.report(
        workers,
        init,
        train_step,
        batch,
        config.method.exchanges(rate, config.steps),
        pod=pod,
        specs=inside.specs(axes),
        bandwidth=bandwidth,
        efficiency=efficiency,
        phases=phases,
    )


def on(config: Config, pod: lj.aot.Pod) -> Config:
    """Returns the configuration with as many workers as the cluster holds.

    Raises:
      ValueError: a worker's devices do not divide those of a slice or host.
    """
    devices = len(pod.devices) // pod.groups
    each = config.workers.devices_each
    if devices % each:
        raise ValueError(
            f"`workers.inside` must divide the {devices} devices of a {pod.unit}, got "
            f"{each} devices for each worker"
        )
    grid = dataclasses.replace(config.workers, nodes=pod.groups, locals=devices // each)
    return dataclasses.replace(config, workers=grid)


def parameters(config: Config) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a worker's parameters."""
    task = task_of(config, warn=lambda text: None)
    start = jax.eval_shape(lambda: task.forward.init(jax.random.key(config.seed)))
    return jax.tree.leaves(start["params"])


@command.with_status
def main(arguments: Sequence[str]) -> int:
    """Compiles and prints.

    Returns:
      The exit status: 0, 1 (a program does not fit) or 2 (wrong usage).
    """
    program = "python -m train.compile"
    options, others = cli.run_with_others(CompileOptions, arguments, program, __doc__)
    config = cli.parse([options.experiment, *others], cli.Command(program, CompileOptions))
    for name in ("mbit", "gbit", "efficiency"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be above 0, got {name}={value:g}")
    mbit = options.mbit if options.gbit is None else 1e3 * options.gbit
    bandwidth = None if mbit is None else mbit / 8 * 1e6
    report = compiled(config, options.pod(), bandwidth, options.efficiency)
    if options.figure is not None:
        report.figure(options.figure)
    if options.json is not None:
        options.json.write_text(report.to_json() + "\n")
    print(report)
    return SUCCESS if report.fits else STOPPED


if __name__ == "__main__":
    sys.exit(command.run(main))
