"""What compiled steps take: memory, bytes of each collective, and computed seconds."""

import collections
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from lsgd_jax._src.aot import table
from lsgd_jax._src.aot.collectives import Collective, Placement, collectives_of
from lsgd_jax._src.aot.flops import flops as count
from lsgd_jax._src.aot.hlo import Program as Parsed
from lsgd_jax._src.aot.memory import Memory, excess, is_out_of_memory, memory_of
from lsgd_jax._src.aot.pod import Pod, pod_of
from lsgd_jax._src.aot.shapes import batch_of, carry_of
from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.exchange.outer import Outer
from lsgd_jax._src.exchange.phases import Phase
from lsgd_jax._src.workers.workers import Workers


BANDWIDTH = 12.5e9  # 100 Gbit/s
LONGEST = 10**6  # steps over which phases are counted


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Computed seconds of one step.

    Attributes:
      compute: the longer one of operations / peak and bytes / HBM bandwidth.
      inside_exposed, inside_hidden: transfers inside a slice or host.
      across_exposed, across_hidden: transfers between slices or hosts.
    """

    compute: float
    inside_exposed: float
    inside_hidden: float
    across_exposed: float
    across_hidden: float

    @property
    def step(self) -> float:
        """Seconds of the whole step: what is hidden takes no time."""
        return self.compute + self.inside_exposed + self.across_exposed


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled step, that of one phase of a method.

    Attributes:
      name: the phase in words, or 'step'.
      is_quiet: whether its phase sends nothing; None without a method.
      share: the share of the steps that run it; None if unknown.
      compile_seconds: the time that XLA took.
      memory: bytes per device; None if it does not fit.
      exceeds: the bytes that are missing if it does not fit, if XLA tells.
      fits: whether it fits into the memory of a device; None if that is not known.
      flops: operations of a device in matrix products; None if unknown.
      bytes_accessed: bytes between HBM and a chip, according to XLA (TPU only), which takes
        the body of a loop once.
      collectives: all collectives.
      text: the scheduled program.
    """

    name: str
    is_quiet: bool | None
    share: float | None
    compile_seconds: float
    memory: Memory | None
    exceeds: int | None
    fits: bool | None
    flops: float | None
    bytes_accessed: float | None
    collectives: tuple[Collective, ...]
    text: str = dataclasses.field(repr=False, default="")

    @property
    def across(self) -> float:
        """Bytes of a step that leave a device's slice or host."""
        return sum(each.times * each.across for each in self.collectives)

    @property
    def inside(self) -> float:
        """Bytes of a step that a device sends inside its slice or host."""
        return sum(x.times * x.sent for x in self.collectives if not x.crosses)


@dataclasses.dataclass(frozen=True)
class Report:
    """The programs of a training step; `report` and `report_of` return it.

    Printed it is a table. All bytes are those of one device.

    Attributes:
      pod: the cluster.
      programs: one per phase of the method, or one.
      bandwidth: bytes per second that a host sends to other slices or hosts.
    """

    pod: Pod
    programs: tuple[Program, ...]
    bandwidth: float = BANDWIDTH

    def __str__(self) -> str:
        return table.text(self)

    @property
    def fits(self) -> bool:
        """Whether all programs fit into the memory of a device, as far as is known."""
        return all(program.fits is not False for program in self.programs)

    def at(self, bandwidth: float) -> "Report":
        """Returns the report for another bandwidth per host, in bytes per second."""
        if not 0 < bandwidth < math.inf:
            raise ValueError(f"`bandwidth` must be above 0, got bandwidth={bandwidth}")
        return dataclasses.replace(self, bandwidth=bandwidth)

    def seconds(self, program: Program) -> Seconds | None:
        """Computes the seconds of a step; None without figures of the chip.

        A transfer between slices or hosts takes its bytes / `bandwidth`, shared by the
        devices of a host; another one its bytes / the link of the chip. It is hidden for
        as long as the matrix products between its start and its end compute.
        """
        chip = self.pod.chip
        if chip is None or program.memory is None:
            return None
        memory = program.memory
        # A step reads its arguments and writes its results at least once.
        moved = max(program.bytes_accessed or 0, memory.arguments + memory.outputs)
        compute = max((program.flops or 0) / chip.flops, moved / chip.memory_bandwidth)
        rates = {True: self.bandwidth / self.pod.per_host, False: chip.link}
        exposed, hidden = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
        left = compute
        # Transfers between slices come first, because they are the longest.
        for each in sorted(program.collectives, key=lambda x: not x.crosses):
            bytes_ = each.across if each.crosses else each.sent
            takes = each.times * bytes_ / rates[each.crosses]
            covered = min(takes, each.overlap * compute, left)
            left -= covered
            hidden[each.crosses] += covered
            exposed[each.crosses] += takes - covered
        return Seconds(compute, exposed[False], hidden[False], exposed[True], hidden[True])

    def mean(self, of: Callable[[Program], float | None]) -> float | None:
        """The mean over the steps of a period: Σ share · of(program); None if unknown.

        >>> import jax, jax.numpy as jnp
        >>> from lsgd_jax import aot
        >>> r = aot.report_of(jax.jit(lambda x: x @ x).trace(jnp.ones((8, 8))))
        >>> r.mean(lambda program: program.flops)
        1024.0
        """
        total = 0.0
        for program in self.programs:
            value = of(program)
            if value is None or program.share is None:
                return None
            total += program.share * value
        return total

    def to_json(self) -> str:
        """The report as JSON, with the seconds, without the programs' texts."""
        chip = self.pod.chip
        programs = []
        for program in self.programs:
            fields: dict[str, Any] = dataclasses.asdict(
                dataclasses.replace(program, text="")
            )
            del fields["text"]
            fields["memory"] = program.memory and {
                **program.memory._asdict(),
                "peak": program.memory.peak,
            }
            fields["collectives"] = [
                {**x._asdict(), "crosses": x.crosses, "hidden": x.hidden}
                for x in program.collectives
            ]
            seconds = self.seconds(program)
            fields["seconds"] = seconds and dataclasses.asdict(seconds)
            programs.append({**fields, "across": program.across, "inside": program.inside})
        whole = {
            "cluster": self.pod.name,
            "devices": len(self.pod.devices),
            "chip": chip and chip._asdict(),
            "bandwidth": self.bandwidth,
            "fits": self.fits,
            "programs": programs,
        }
        return json.dumps(whole, indent=1)

    def figure(self, path: Any) -> None:
        """Draws the computed seconds of each program; needs matplotlib.

        Raises:
          ImportError: matplotlib is missing. ValueError: figures of the chip are missing.
        """
        table.figure(self, path)


def report(
    workers: Workers,
    init: Callable[[], tuple],
    train_step: Callable[..., tuple],
    batch: Any,
    method: Exchange | Outer | None = None,
    *,
    phases: Iterable[Phase] | None = None,
    pod: Pod | None = None,
    specs: Any = None,
    batch_specs: Any = None,
    bandwidth: float = BANDWIDTH,
    compiler_options: dict[str, Any] | None = None,
    on_program: Callable[[Program], None] | None = None,
) -> Report:
    """Compiles a training step for the devices of the workers and reports what it takes.

    No array is made: only shapes are traced. With a method there is one program for each of
    its phases.

    Args:
      workers: over the mesh of a described cluster, `Pod.mesh`, or over real devices.
      init: the initial state of one worker, without arguments: ``(params, opt_state, …)``.
      train_step: the step of one worker: ``train_step(*state, batch)``, or with a method
        ``train_step(*state, batch, phase=phase)``, returns ``(*state, …)``.
      batch: shapes of the batch of one worker, a tree of `jax.ShapeDtypeStruct`.
      method: the method in the step, whose phases are compiled.
      phases: the phases to compile. Defaults to ``method.phases()``.
      pod: the cluster. Defaults to the devices of the workers.
      specs: how the parameters are sharded inside a worker, as for `Workers.put`.
      batch_specs: likewise for the batch.
      bandwidth: bytes per second that a host sends to other slices or hosts.
      compiler_options: options of XLA, as for `jax.jit`.
      on_program: called with each program as soon as it is compiled.

    Raises:
      ValueError: a method without phases; see `Workers.map`.

    >>> import jax, jax.numpy as jnp, optax
    >>> import lsgd_jax as lj
    >>> from lsgd_jax import aot
    >>> workers, method = lj.Workers(nodes=2, locals=4), lj.diloco(period=10)
    >>> tx = optax.chain(optax.sgd(0.1), method)
    >>> def init():
    ...     params = {"w": jnp.zeros((16, 16))}
    ...     return params, tx.init(params)
    >>> def train_step(params, state, x, phase):
    ...     loss_of = lambda p: jnp.square(x @ p["w"]).mean()
    ...     loss, grads = jax.value_and_grad(loss_of)(params)
    ...     updates, state = tx.update(grads, state, params, loss=loss, phase=phase)
    ...     return lj.apply_updates(params, updates), state, loss
    >>> batch = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    >>> r = aot.report(workers, init, train_step, batch, method)
    >>> [(program.name, round(program.share, 2)) for program in r.programs]
    [('send 0, land 0', 0.1), ('quiet', 0.9)]
    """
    shares = _phases(method)
    chosen = list(shares if phases is None else phases)
    carry, batch = carry_of(workers, init, specs), batch_of(workers, batch, batch_specs)
    donated = tuple(range(len(carry)))
    pod = pod or pod_of(workers.mesh.devices.flat)
    programs = []
    for phase in chosen:
        named = {} if method is None else {"phase": phase}
        one = functools.partial(train_step, **named)
        mapped: Any = workers.map(one, donate=donated)
        traced = mapped.trace(*carry, batch)
        each = count(traced.jaxpr) / len(pod.devices)
        compiled, seconds, error = _compiled(traced.lower(), compiler_options)
        name = "step" if method is None else str(phase)
        program = _program(compiled, seconds, error, pod, name, each)
        quiet = None if method is None else phase.is_quiet
        program = dataclasses.replace(program, is_quiet=quiet, share=shares.get(phase))
        programs.append(program)
        if on_program is not None:
            on_program(program)
    return Report(pod, tuple(programs)).at(bandwidth)


def report_of(
    step: jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled,
    name: str = "step",
    *,
    pod: Pod | None = None,
    flops: float | None = None,
    bandwidth: float = BANDWIDTH,
    compiler_options: dict[str, Any] | None = None,
) -> Report:
    """Reports what a step of your own takes, around `jit`, `vmap` or `shard_map`.

    Args:
      step: ``jitted.trace(*shapes)``, ``jitted.lower(*shapes)`` or a compiled program, with
        arrays of shapes that have a sharding on the mesh of a described cluster.
      name: its name in the table.
      pod: the cluster. Defaults to the devices of the program.
      flops: operations of a device. Defaults to those of the matrix products in a traced
        step, otherwise to XLA's count, which takes the body of a loop once.
      bandwidth, compiler_options: as for `report`.

    >>> import jax, jax.numpy as jnp
    >>> from lsgd_jax import aot
    >>> product = jax.jit(lambda x: x @ x)
    >>> report = aot.report_of(product.trace(jax.ShapeDtypeStruct((64, 64), jnp.float32)))
    >>> report.programs[0].flops == 2 * 64**3
    True
    """
    total = None
    if isinstance(step, jax.stages.Traced):
        total, step = count(step.jaxpr), step.lower()
    compiled, seconds, error = _compiled(step, compiler_options)
    if compiled is not None:
        devices = _devices(compiled)
        pod = pod or pod_of(devices)
    elif pod is None:
        raise ValueError(
            "the program does not fit into the memory of a device; pass `pod=` for a "
            f"report: {_first_line(error)}"
        )
    each = flops if total is None else total / len(pod.devices)
    program = _program(compiled, seconds, error, pod, name, each)
    return Report(pod, (program,)).at(bandwidth)


def check_quiet(report: Report) -> None:
    """Raises unless all quiet phases send nothing to other slices or hosts.

    Raises:
      AssertionError: a quiet phase that sends. ValueError: a report without quiet phases.
    """
    quiet = [program for program in report.programs if program.is_quiet]
    if not quiet:
        raise ValueError("the report has no quiet phase: `report` needs the method")
    for program in quiet:
        crossing = [each for each in program.collectives if each.crosses]
        if crossing:
            sent = ", ".join(f"{x.kind} ({x.across:.0f} bytes)" for x in crossing)
            raise AssertionError(
                f"the quiet phase {program.name!r} sends across {report.pod.unit}s: {sent}"
            )


def _phases(method: Exchange | Outer | None) -> dict[Any, float | None]:
    """The phases of a method, with the share of the steps of each in the long run."""
    if method is None:
        return {None: 1.0}
    if not isinstance(method, Exchange | Outer):
        raise ValueError(
            "`method` must be a method that pulls, or an `outer` of one, got "
            f"method={method!r}; leave it out for a step without phases"
        )
    exchange = method.method if isinstance(method, Outer) else method
    period = math.lcm(*(pull.every for pull in exchange.pulls))
    phases: dict[Any, float | None] = dict.fromkeys(method.phases())
    if period <= LONGEST:
        seen = collections.Counter(
            method.phase(t) for t in range(period + 1, 2 * period + 1)
        )
        phases = {phase: seen[phase] / period for phase in phases}
    return phases


def _compiled(
    step: Any, options: dict[str, Any] | None
) -> tuple[Any, float, Exception | None]:
    """Compiles a lowered step: (program or None, seconds, error if it does not fit)."""
    if isinstance(step, jax.stages.Compiled):
        return step, 0.0, None
    start = time.perf_counter()
    try:
        compiled = step.compile(options) if options else step.compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, time.perf_counter() - start, error
    return compiled, time.perf_counter() - start, None


def _program(
    compiled: Any,
    seconds: float,
    error: Exception | None,
    pod: Pod,
    name: str,
    flops: float | None,
) -> Program:
    if compiled is None:
        missing = excess(error) if error else None
        return Program(name, None, 1.0, seconds, None, missing, False, flops, None, ())
    costs = _costs(compiled)
    memory, text = memory_of(compiled), compiled.as_text()
    order = _devices(compiled) or pod.devices
    placement = Placement(
        [pod.across(device) for device in order], splits=pod.unit == "slice"
    )
    fits = excess_ = None
    if memory is not None and pod.chip is not None:
        fits = memory.peak <= pod.chip.memory
        excess_ = None if fits else memory.peak - pod.chip.memory
    return Program(
        name=name,
        is_quiet=None,
        share=1.0,
        compile_seconds=seconds,
        memory=memory,
        exceeds=excess_,
        fits=fits,
        flops=costs.get("flops") if flops is None else flops,
        bytes_accessed=costs.get("bytes accessed"),
        collectives=tuple(collectives_of(Parsed(text), placement)),
        text=text,
    )


def _costs(compiled: Any) -> dict[str, float]:
    """XLA's own counts, which some backends do not have."""
    try:
        found = compiled.cost_analysis()
    except jax.errors.JaxRuntimeError:
        return {}
    found = found[0] if isinstance(found, list) and found else found
    return dict(found or {})


def _devices(compiled: Any) -> Sequence[jax.Device]:
    """The devices of a program in the order in which it numbers them."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return tuple(sharding.mesh.devices.flat)
    found = {device for sharding in shardings for device in sharding.device_set}
    return sorted(found, key=lambda device: device.id)


def _first_line(error: Exception | None) -> str:
    return str(error).partition("\n")[0]
