"""How long exchanges make workers wait, and the settings that keep this within a share."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import lsgd_jax as lj


WIRES: tuple[lj.WireFormat, ...] = ("float32", "int8", "int4")
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
MOST_FRAGMENTS = 16
OVERHEAD = 0.1  # what fragments may add to an exchange by their latencies


class Link(NamedTuple):
    """How a group of workers exchanges parameters: one all-reduce, all at once.

    Attributes:
      latency: seconds of an exchange of next to nothing.
      rate: bytes of parameters per second, on top of that.
      workers: in the group.
      measured: seconds of whole pulls by kind ('leader' or 'mean') and wire format, with
        the work to round parameters and put them together; what is not there is worked out.
    """

    latency: float
    rate: float
    workers: int
    measured: Mapping[tuple[str, str], float] = {}

    @classmethod
    def of(cls, seconds: float, latency: float, payload: int, workers: int) -> "Link":
        """From the seconds that an exchange of a payload takes, and one of nothing.

        >>> Link.of(seconds=0.12, latency=0.02, payload=1_000_000, workers=4).rate
        10000000.0
        """
        moving = max(seconds - latency, seconds / 100)
        return cls(min(latency, seconds), payload / moving, workers)

    @classmethod
    def given(cls, mbit: float, latency_ms: float, workers: int) -> "Link":
        """From what each worker can send, in Mbit/s, as a ring all-reduce uses it.

        >>> Link.given(mbit=120, latency_ms=5, workers=4).rate
        10000000.0
        """
        rate = mbit * 1e6 / 8 * workers / (2 * max(workers - 1, 1))
        return cls(latency_ms / 1e3, rate, workers)


class Proposal(NamedTuple):
    """Settings of a method, and what they cost.

    Attributes:
      method: its name.
      local, period: steps between exchanges inside the node and among all; None: no such
        level.
      wire: the format in which parameters travel.
      fragments: parts that are exchanged one after the other.
      delay: steps that an exchange lasts, so that it costs nothing where it travels in the
        background.
      wait: seconds per step, on average, that workers wait for exchanges.
      pause: seconds of the longest one.
      share: of the time that is spent waiting.
      overlapped: the same where exchanges travel in the background.
    """

    method: str
    local: int | None
    period: int | None
    wire: lj.WireFormat
    fragments: int
    delay: int
    wait: float
    pause: float
    share: float
    overlapped: float

    @property
    def options(self) -> str:
        """As they stand on the command line."""
        levels = (("local-period", self.local), ("global-period", self.period))
        if self.method == "diloco":
            levels = (("period", self.period), ("fragments", self.fragments))
        given = [f"--method.{name} {n}" for name, n in levels if n is not None]
        return " ".join([f"--method {self.method}", *given, f"--method.wire {self.wire}"])


def size(wire: lj.WireFormat, payload: int) -> float:
    """Bytes that a float32 payload has in a wire format, with its scales.

    >>> size("int8", 4096), size("float32", 4096)
    (1040.0, 4096.0)
    """
    elements, block = payload / 4, lj.Wire().block
    scales = 4 * elements / block if BITS[wire] <= 8 else 0
    return elements * BITS[wire] / 8 + scales


def messages(wire: lj.WireFormat) -> int:
    """In how many parameters travel, one after the other: the scales go by themselves."""
    return 2 if BITS[wire] <= 8 else 1


def leader_seconds(link: Link, payload: int, wire: lj.WireFormat = "float32") -> float:
    """Seconds of a pull towards a leader: the election, then the leader's parameters."""
    if ("leader", wire) in link.measured:
        return link.measured["leader", wire]
    return (1 + messages(wire)) * link.latency + size(wire, payload) / link.rate


def mean_seconds(link: Link, payload: int, wire: lj.WireFormat = "float32") -> float:
    """Seconds of a mean: of float32 an all-reduce, of fewer bits a gather of all.

    An all-reduce brings each worker 2 (W - 1) / W payloads, a gather W - 1.
    """
    if ("mean", wire) in link.measured:
        return link.measured["mean", wire]
    more = 1.0 if wire == "float32" else link.workers / 2
    return messages(wire) * link.latency + more * size(wire, payload) / link.rate


def share_of(wait: float, step: float) -> float:
    """The share of the time that is spent waiting.

    >>> share_of(wait=0.025, step=0.075)
    0.25
    """
    return wait / (step + wait)


def overlapped_wait(exchange: float, delay: int, step: float) -> float:
    """Seconds waited for an exchange that travels while `delay` steps are taken."""
    return max(0.0, exchange - delay * step)


def delay_for(exchange: float, step: float, period: int) -> int:
    """The steps that an exchange lasts, fewer than a period has.

    >>> delay_for(exchange=0.25, step=0.1, period=8), delay_for(2.5, 0.1, period=8)
    (3, 7)
    """
    return min(math.ceil(exchange / step), period - 1)


def power_of_two(least: float) -> int:
    """The smallest power of two that is at least so much, and 1.

    >>> power_of_two(0.3), power_of_two(16), power_of_two(17)
    (1, 16, 32)
    """
    return 2 ** max(0, math.ceil(math.log2(least)))


def periods(
    inner: float | None, outer: float | None, step: float, share: float
) -> tuple[int | None, int | None]:
    """The periods of a level in the node and one of all, from the seconds of an exchange.

    Exchanges then take no more than a share of a step. Each of two levels gets half of it,
    and the outer period is at least the inner one; None for a level that does not exist.
    """
    levels = sum(seconds is not None for seconds in (inner, outer))
    find = lambda seconds: (
        None if seconds is None else power_of_two(levels * seconds / (share * step))
    )
    local, wide = find(inner), find(outer)
    if local is not None and wide is not None:
        wide = max(local, wide)
    return local, wide


def lsgd(
    inner: Link | None,
    outer: Link | None,
    step: float,
    payload: int,
    share: float,
    wire: lj.WireFormat = "float32",
) -> Proposal:
    """LSGD's periods for a share of the time."""
    seconds = [
        None if link is None else leader_seconds(link, payload, wire)
        for link in (inner, outer)
    ]
    local, wide = periods(seconds[0], seconds[1], step, share / (1 - share))
    levels = zip(seconds, (local, wide))
    costs = [(s, p) for s, p in levels if s is not None and p is not None]
    wait, pause = sum(s / p for s, p in costs), sum(s for s, _ in costs)
    shortest = min(p for _, p in costs)
    delay = delay_for(pause, step, shortest)
    late = sum(overlapped_wait(s, delay, step) / p for s, p in costs)
    return Proposal(
        "lsgd",
        local,
        wide,
        wire,
        1,
        delay,
        wait,
        pause,
        share_of(wait, step),
        share_of(late, step),
    )


def diloco(
    link: Link,
    step: float,
    payload: int,
    share: float,
    wire: lj.WireFormat = "float32",
    leaves: int = MOST_FRAGMENTS,
) -> Proposal:
    """DiLoCo's period for a share of the time, and fragments as short as latency lets."""
    whole = mean_seconds(link, payload, wire)
    allowed = share / (1 - share) * step
    fragments, more = 1, messages(wire) * link.latency
    while (
        2 * fragments <= min(leaves, MOST_FRAGMENTS)
        and (2 * fragments - 1) * more <= OVERHEAD * whole
    ):
        fragments *= 2
    total = whole + (fragments - 1) * more
    period = power_of_two(max(total / allowed, fragments))
    wait, pause = total / period, total / fragments
    delay = delay_for(pause, step, period // fragments)
    late = fragments * overlapped_wait(pause, delay, step) / period
    return Proposal(
        "diloco",
        None,
        period,
        wire,
        fragments,
        delay,
        wait,
        pause,
        share_of(wait, step),
        share_of(late, step),
    )


def proposals(
    inner: Link | None,
    outer: Link | None,
    step: float,
    payload: int,
    share: float,
    leaves: int = MOST_FRAGMENTS,
) -> Iterator[Proposal]:
    """LSGD and DiLoCo in each wire format; no level if it has one worker only.

    Args:
      inner, outer: among the workers of a node, and among all.
      step: seconds of a step without exchanges.
      payload: bytes of the parameters, in float32.
      share: the most of the time that may be spent waiting, on average.
      leaves: of the parameters: a fragment has one at least.
    """
    widest = outer or inner
    for wire in WIRES:
        yield lsgd(inner, outer, step, payload, share, wire)
    for wire in WIRES:
        if widest is not None:
            yield diloco(widest, step, payload, share, wire, leaves)
