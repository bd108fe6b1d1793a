"""Compiles steps and reports what they take."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from lsgd_jax._src.aot.collectives import Placement, collectives_of
from lsgd_jax._src.aot.flops import flops as count
from lsgd_jax._src.aot.hlo import HloModule
from lsgd_jax._src.aot.kernels import moved
from lsgd_jax._src.aot.memory import excess, memory_of
from lsgd_jax._src.aot.pod import Pod, pod_of
from lsgd_jax._src.aot.report import Program, Report, shares_of
from lsgd_jax._src.aot.shapes import batch_of, carry_of
from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.exchange.outer import Outer
from lsgd_jax._src.exchange.phases import Phase, Sizes
from lsgd_jax._src.workers.workers import Workers


LATENCY = 1e-4  # seconds of a collective between slices or hosts
Stage = jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled


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
    bandwidth: float | None = None,
    efficiency: float | None = None,
    latency: float = LATENCY,
    compiler_options: dict[str, Any] | None = None,
    on_program: Callable[[Program], None] | None = None,
) -> Report:
    """Compiles a training step for the devices of the workers and reports what it takes.

    No array is made: only shapes are traced. With a method there is one program for each of
    its phases.

    Args:
      workers: over the mesh of a described cluster, `Pod.mesh`, or over real devices.
      init: the initial state of one worker, without arguments: ``(params, opt_state, …)``,
        or one that is no tuple, such as a `TrainState`.
      train_step: the step of one worker: ``train_step(*state, batch)``, or with a method
        ``train_step(*state, batch, phase=phase)``, returns ``(*state, …)``.
      batch: shapes of the batch of one worker, a tree of `jax.ShapeDtypeStruct`.
      method: the method in the step, whose phases are compiled.
      phases: the phases to compile. Defaults to
        ``method.phases(workers.sizes)``.
      pod: the cluster. Defaults to the devices of the workers.
      specs: how the parameters are sharded inside a worker, as for `Workers.put`. The rest
        of the state follows them. The parameters of a `TrainState` are its `params`.
      batch_specs: likewise for the batch.
      bandwidth: bytes per second that a host sends to other slices or hosts. Defaults to
        `Pod.bandwidth`.
      efficiency: the share of the chip's peak at which a step computes. Defaults to that of
        published runs, `Chip.efficiency`.
      latency: seconds of a collective between slices or hosts.
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
    shares = shares_of(method, workers.sizes)
    carry = carry_of(workers, init, specs)
    batch = batch_of(workers, batch, batch_specs)
    donated = tuple(range(len(carry)))

    def steps() -> Iterator[tuple[Any, Any]]:
        chosen = shares if phases is None else phases
        for phase in chosen:
            named = {} if method is None else {"phase": phase}
            one = functools.partial(train_step, **named)
            mapped: Any = workers.map(one, donate=donated)
            yield phase, mapped.trace(*carry, batch)

    pod = pod or pod_of(workers.mesh.devices.flat)
    programs = []
    for phase, step in steps():
        name = "step" if method is None else str(phase)
        program, _ = _program(step, name, pod, phase, shares.get(phase), compiler_options)
        programs.append(program)
        if on_program is not None:
            on_program(program)
    return _report(pod, programs, bandwidth, efficiency, latency)


def report_of(
    step: Stage | Mapping[Any, Stage],
    name: str = "step",
    method: Exchange | Outer | None = None,
    *,
    sizes: Sizes | None = None,
    pod: Pod | None = None,
    flops: float | None = None,
    bandwidth: float | None = None,
    efficiency: float | None = None,
    latency: float = LATENCY,
    compiler_options: dict[str, Any] | None = None,
) -> Report:
    """Reports what a step of your own takes, around `jit`, `vmap` or `shard_map`.

    Args:
      step: ``jitted.trace(*shapes)``, ``jitted.lower(*shapes)`` or a compiled program, with
        arrays of shapes that have a sharding on the mesh of a described cluster. Or one for
        each phase of a method: ``{phase: trace(phase) for phase in method.phases()}``.
      name: its name in the table; programs of phases are called after their phase.
      method: the method of the phases, for the shares of the steps that run them.
      sizes: the sizes of the axes if the phases name rounds, as for `Exchange.phase`.
      pod: the cluster. Defaults to the devices of the program.
      flops: operations of a device. Defaults to those of the matrix products in a traced
        step, otherwise to XLA's count, which takes the body of a loop once.
      bandwidth, efficiency, latency, compiler_options: as for `report`.

    Raises:
      ValueError: a program that does not fit, without `pod`.

    >>> import jax, jax.numpy as jnp
    >>> from lsgd_jax import aot
    >>> product = jax.jit(lambda x: x @ x)
    >>> report = aot.report_of(product.trace(jax.ShapeDtypeStruct((64, 64), jnp.float32)))
    >>> report.programs[0].flops == 2 * 64**3
    True
    """
    shares = shares_of(method, sizes)
    programs = []
    by_phase = step if isinstance(step, Mapping) else {None: step}
    for phase, each in by_phase.items():
        words = name if phase is None else str(phase)
        program, pod = _program(
            each, words, pod, phase, shares.get(phase), compiler_options, flops
        )
        programs.append(program)
    if pod is None:
        raise ValueError("`step` must have at least one phase, got {}")
    return _report(pod, programs, bandwidth, efficiency, latency)


def _report(
    pod: Pod,
    programs: Iterable[Program],
    bandwidth: float | None,
    efficiency: float | None,
    latency: float,
) -> Report:
    if efficiency is None:
        efficiency = pod.chip.efficiency if pod.chip else 1.0
    bandwidth = pod.bandwidth if bandwidth is None else bandwidth
    report = Report(pod, tuple(programs))
    return report.at(bandwidth, efficiency=efficiency, latency=latency)


def _program(
    step: Stage,
    name: str,
    pod: Pod | None,
    phase: Phase | None,
    share: float | None,
    options: dict[str, Any] | None,
    flops: float | None = None,
) -> tuple[Program, Pod]:
    """Compiles a step, unless it is compiled already, and reads the program."""
    total = None
    if isinstance(step, jax.stages.Traced):
        total = count(step.jaxpr)
        step = step.lower()
    compiled, seconds, error = _compiled(step, options)
    if pod is None and compiled is None:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            "the program does not fit into the memory of a device; pass `pod=` for a "
            f"report: {reason}"
        )
    pod = pod or pod_of(_devices(compiled))
    if flops is None and total is not None:
        flops = total / len(pod.devices)
    known: dict[str, Any] = {
        "name": name,
        "is_quiet": None if phase is None else phase.is_quiet,
        "share": share,
        "compile_seconds": seconds,
        "phase": phase,
    }
    if compiled is None:
        text = str(error)
        missing = excess(error) if error else None
        return Program(
            **known,
            memory=None,
            exceeds=missing,
            fits=False,
            flops=flops,
            bytes_accessed=None,
            collectives=(),
            text=text,
        ), pod
    costs = _costs(compiled)
    memory = memory_of(compiled)
    text = compiled.as_text()
    scheduled = HloModule(text)
    chip = pod.chip
    is_gpu = chip is not None and not chip.overlaps
    order = _devices(compiled) or pod.devices
    fits = None
    missing = None
    if memory is not None and pod.memory is not None:
        fits = memory.peak <= pod.memory
        missing = None if fits else memory.peak - pod.memory
    placement = Placement(
        [pod.across(device) for device in order],
        splits=pod.unit == "slice",
        links=lambda kind, members: pod.links(
            kind, [order[i % len(order)] for i in members]
        ),
    )
    return Program(
        **known,
        memory=memory,
        exceeds=missing,
        fits=fits,
        flops=costs.get("flops") if flops is None else flops,
        bytes_accessed=moved(scheduled) if is_gpu else costs.get("bytes accessed"),
        collectives=tuple(collectives_of(scheduled, placement)),
        text=text,
    ), pod


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
        if "RESOURCE_EXHAUSTED" not in str(error):  # more memory than a device has
            raise
        return None, time.perf_counter() - start, error
    return compiled, time.perf_counter() - start, None


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
