"""What compiled steps take: memory, bytes of each collective, and computed seconds."""

import collections
import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from lsgd_jax._src.aot import table
from lsgd_jax._src.aot.buffers import Buffer, largest
from lsgd_jax._src.aot.collectives import Collective, beside
from lsgd_jax._src.aot.memory import Memory
from lsgd_jax._src.aot.pod import Pod
from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.exchange.outer import Outer
from lsgd_jax._src.exchange.phases import Phase, Sizes, cycle_of, skips_of


LATENCY_INSIDE = 1e-6  # seconds of a collective inside a slice or host
LONGEST = 10**6  # steps over which phases are counted
DRAWN = 10**4  # at least, where steps without a gradient are drawn


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Computed seconds of one step.

    Attributes:
      compute: the longer one of operations / peak and bytes / HBM bandwidth, on GPUs their
        sum, divided by the efficiency.
      inside_exposed, inside_hidden: transfers inside a slice or host.
      across_exposed, across_hidden: transfers between slices or hosts.
    """

    compute: float
    inside_exposed: float
    inside_hidden: float
    across_exposed: float
    across_hidden: float

    @property
    def exposed(self) -> float:
        """Seconds of all transfers beside which nothing is computed."""
        return self.inside_exposed + self.across_exposed

    @property
    def step(self) -> float:
        """Seconds of the whole step: what is hidden takes no time."""
        return self.compute + self.exposed


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
      bytes_accessed: bytes between HBM and a chip: those of all kernels of a GPU, and on
        TPUs XLA's count, which takes the body of a loop once.
      collectives: all collectives.
      phase: the phase of the method; None without one.
      text: the scheduled program, or XLA's message about one that does not fit.
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
    phase: Phase | None = None
    text: str = dataclasses.field(repr=False, default="")

    @property
    def across(self) -> float:
        """Bytes of a step that leave a device's slice or host."""
        return sum(each.times * each.across for each in self.collectives)

    def beside(self, each: Collective) -> float:
        """The share of the products beside a message; those of two rounds are added."""
        return beside(each, self.collectives)

    def largest(self) -> list[Buffer]:
        """The temporaries when most memory is in use, largest first, with their names.

        They are read from the scheduled program and estimate what XLA allocates. Of a
        program that does not fit there are none: `text` has what XLA says about it.

        >>> import jax, jax.numpy as jnp
        >>> from lsgd_jax import aot
        >>> f = lambda x: (x @ x) @ x
        >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> (program,) = aot.report_of(jax.jit(f).trace(x)).programs
        >>> program.largest()[0].shape
        'f32[64,64]'
        """
        return largest(self.text) if self.memory else []

    @property
    def inside(self) -> float:
        """Bytes of a step that a device sends inside its slice or host."""
        return sum(x.times * x.sent for x in self.collectives if not x.crosses)


@dataclasses.dataclass(frozen=True)
class Report:
    """The programs of a training step; `report` and `report_of` return it.

    Printed it is two tables, memory and the seconds of a step, which 100 columns of a
    terminal hold. All bytes are those of one device.

    Attributes:
      pod: the cluster.
      programs: one per phase of the method, or one.
      bandwidth: bytes per second that a host sends to other slices or hosts.
      efficiency: the share of the chip's peak at which a step computes.
      latency: seconds of a collective between slices or hosts beside those of its bytes.
    """

    pod: Pod
    programs: tuple[Program, ...]
    bandwidth: float = 12.5e9
    efficiency: float = 1.0
    latency: float = 0.0

    def __str__(self) -> str:
        return table.text(self)

    @property
    def hbm(self) -> int | None:
        """Bytes of HBM per device with all programs loaded; None if one does not fit."""
        known = [x.memory for x in self.programs if x.memory is not None]
        if len(known) < len(self.programs):
            return None
        return max(x.data for x in known) + sum(x.code for x in known)

    @property
    def fits(self) -> bool:
        """Whether all programs fit into a device together, as far as is known."""
        most = self.pod.memory
        used = self.hbm
        if any(program.fits is False for program in self.programs):
            return False
        return most is None or used is None or used <= most

    def at(
        self,
        bandwidth: float | None = None,
        *,
        efficiency: float | None = None,
        latency: float | None = None,
    ) -> "Report":
        """Returns the report for other assumptions, without compiling again.

        Args:
          bandwidth: bytes per second per host to other slices or hosts.
          efficiency: the share of the chip's peak; 1 is the roofline.
          latency: seconds of a collective between slices or hosts.
        """
        given = {"bandwidth": bandwidth, "efficiency": efficiency, "latency": latency}
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            smallest = "at least" if name == "latency" else "above"
            if not 0 <= value < math.inf or not (value or name == "latency"):
                raise ValueError(f"`{name}` must be {smallest} 0, got {name}={value}")
        return dataclasses.replace(self, **given)

    def calibrated(self, step_seconds: float, program: Program | None = None) -> "Report":
        """Returns the report with the efficiency at which a step takes as long as measured.

        Args:
          step_seconds: measured seconds of a step.
          program: the program that was measured. Defaults to the mean over all programs.

        Raises:
          ValueError: no figures of the chip are known, or the exposed transfers alone take
            longer.
        """

        def step(report: Report) -> Any:
            return report.mean_seconds() if program is None else report.seconds(program)

        if step(self) is None:
            raise ValueError("there are no seconds to calibrate: see `Report.seconds`")
        # More compute hides more, but never more than it adds.
        low = 1e-6
        high = 1e3
        for _ in range(100):
            middle = math.sqrt(low * high)
            is_slower = step(self.at(efficiency=middle)).step > step_seconds
            low, high = (middle, high) if is_slower else (low, middle)
        found = self.at(efficiency=high)
        if not math.isclose(step(found).step, step_seconds, rel_tol=1e-3):
            raise ValueError(
                f"`step_seconds` must be above the {step(found).step:.3g} s of exposed "
                f"transfers, got step_seconds={step_seconds:g}"
            )
        return found

    def over(self, method: "Exchange | Outer", sizes: Sizes | None = None) -> "Report":
        """Returns the report for another period of the same method, without compiling.

        Args:
          method: one with the same phases, which occur more or less often.
          sizes: the sizes of the axes if the phases name rounds, as for `Exchange.phase`.

        Raises:
          ValueError: a method with other phases.
        """
        shares = shares_of(method, sizes)
        missing = [p.name for p in self.programs if p.phase not in shares]
        if missing:
            raise ValueError(
                f"`method` must have the phases of the report, got none like {missing[0]!r}"
            )
        programs = (dataclasses.replace(p, share=shares[p.phase]) for p in self.programs)
        return dataclasses.replace(self, programs=tuple(programs))

    def seconds(self, program: Program) -> Seconds | None:
        """Computes the seconds of a step; None without figures of the chip.

        A transfer between slices or hosts takes a latency and its bytes / `bandwidth`,
        shared by the devices of a host; another one its bytes / those links of the chip
        that its group can use. It is hidden for as long as the matrix products between its
        start and its end compute. Transfers of one kind between slices or hosts share them.
        """
        chip = self.pod.chip
        if chip is None or program.memory is None:
            return None
        memory = program.memory
        # A step reads its arguments and writes its results at least once.
        moved = max(program.bytes_accessed or 0, memory.arguments + memory.outputs)
        both = (program.flops or 0) / chip.flops, moved / chip.memory_bandwidth
        compute = (max(both) if chip.overlaps else sum(both)) / self.efficiency
        exposed = {True: 0.0, False: 0.0}
        hidden = {True: 0.0, False: 0.0}
        left = compute
        used = {}
        # Transfers between slices come first, because they are the longest.
        for each in sorted(program.collectives, key=lambda x: not x.crosses):
            if each.crosses:
                seconds = each.across * self.pod.per_host / self.bandwidth + self.latency
            else:
                seconds = each.sent / (chip.link * each.links)
                seconds += LATENCY_INSIDE * (self.latency > 0)
            takes = each.times * seconds
            covered = min(takes, each.overlap * compute, left)
            if each.crosses:
                # Those of one kind travel together, and the rounds of a mean do not.
                free = each.overlap * compute - used.get(each.kind, 0.0)
                covered = min(covered, max(0.0, free))
                used[each.kind] = used.get(each.kind, 0.0) + covered
            left -= covered
            hidden[each.crosses] += covered
            exposed[each.crosses] += takes - covered
        return Seconds(compute, exposed[False], hidden[False], exposed[True], hidden[True])

    def mean_seconds(self) -> Seconds | None:
        """The seconds of the mean step over a period; None if they are unknown."""
        if any(self.seconds(program) is None for program in self.programs):
            return None
        means = {}
        for field in dataclasses.fields(Seconds):
            of = operator.attrgetter(field.name)
            mean = self.mean(lambda program, of=of: of(self.seconds(program)))
            if mean is None:
                return None
            means[field.name] = mean
        return Seconds(**means)

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
            del fields["text"], fields["phase"]
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
        mean = self.mean_seconds()
        whole = {
            "cluster": self.pod.name,
            "devices": len(self.pod.devices),
            "chip": chip and chip._asdict(),
            "bandwidth": self.bandwidth,
            "efficiency": self.efficiency,
            "latency": self.latency,
            "hbm": self.hbm,
            "fits": self.fits,
            "mean_seconds": mean and dataclasses.asdict(mean),
            "programs": programs,
        }
        return json.dumps(whole, indent=1)

    def figure(self, path: Any) -> None:
        """Draws the computed seconds of each program; needs matplotlib.

        Raises:
          ImportError: matplotlib is missing. ValueError: figures of the chip are missing.
        """
        table.figure(self, path)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Reports of several steps: with and without a method, or with other periods.

    Printed it is a table with one line for each step: the memory with all programs loaded,
    and the mean over a period of the bytes and seconds.

    Attributes:
      reports: by name.

    >>> import jax, jax.numpy as jnp
    >>> from lsgd_jax import aot
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> report = lambda f: aot.report_of(jax.jit(f).trace(x))
    >>> both = aot.Comparison({"one": report(lambda x: x @ x), "sum": report(jnp.sum)})
    >>> [line.split()[:2] for line in str(both).splitlines() if line[:3] in both.reports]
    [['one', '1'], ['sum', '1']]
    """

    reports: Mapping[str, Report]

    def __str__(self) -> str:
        return table.comparison(self)

    @property
    def fits(self) -> bool:
        """Whether every step fits into the memory of a device, as far as is known."""
        return all(report.fits for report in self.reports.values())

    def to_json(self) -> str:
        """The reports as JSON, by name."""
        whole = {name: json.loads(x.to_json()) for name, x in self.reports.items()}
        return json.dumps(whole, indent=1)


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


def shares_of(
    method: Exchange | Outer | None, sizes: Sizes | None = None
) -> dict[Any, float | None]:
    """The phases of a method, with the share of the steps of each in the long run."""
    if method is None:
        return {None: 1.0}
    if not isinstance(method, Exchange | Outer):
        raise ValueError(
            "`method` must be a method that pulls, or an `outer` of one, got "
            f"method={method!r}; leave it out for a step without phases"
        )
    exchange = method.method if isinstance(method, Outer) else method
    begin = max((t for pull in exchange.pulls for t in pull.schedule.changes), default=0)
    period = cycle_of(exchange.pulls, sizes, begin + 1)
    if skips_of(exchange.pulls):
        # Steps without a gradient do not start over: their share is that of many steps.
        period *= -(-DRAWN // period)
    phases: dict[Any, float | None] = dict.fromkeys(method.phases(sizes))
    if period <= LONGEST:
        seen = collections.Counter(
            method.phase(begin + t, sizes) for t in range(period + 1, 2 * period + 1)
        )
        phases = {phase: seen[phase] / period for phase in phases}
    return phases
