"""Methods with their settings, and the time that training takes with each of them.

All candidates run in lock step. A delay of one step hides as much as a step computes; a
longer one hides no more, because a step's program ends with its collectives. Data parallel
gets the best case: gradients are sent layer by layer during the backward pass, which is two
thirds of a step (see `bandwidth`).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from train.planning import laws
from train.planning.links import Link


INSIDE, ACROSS, ALL = "inside the node", "across nodes", "all workers"
FRAGMENTS = 1, 4, 16
WIRES = "float32", "int8", "int4"
KNOWN = 32, 96  # periods near those with a law, 30 and 100, that fragments divide
LONGEST, RARELY = 1024, 10  # the longest period, and the fewest exchanges of a run
SPARSE = 32  # the shortest period of sparse-diloco; its default is 30
BACKWARD = 2 / 3  # the share of a step in which gradients become ready


class Method(NamedTuple):
    """A method and its settings, except for its periods.

    Attributes:
      name: as in the trainer.
      fragments, delay, wire: as in the trainer; 'sparse' is the wire of sparse-diloco.
    """

    name: str
    fragments: int = 1
    delay: int = 0
    wire: str = "float32"


def methods(leaves: int | None = None) -> Iterator[Method]:
    """Yields the methods that a plan compares, the simplest first.

    Args:
      leaves: number of leaves of the parameters, the limit for the number of fragments.
    """
    yield Method("allreduce")
    for wire in WIRES:
        for fragments in FRAGMENTS:
            if fragments <= (leaves or fragments):
                yield from (Method("diloco", fragments, d, wire) for d in (0, 1))
    yield from (Method("local-sgd", wire=wire) for wire in WIRES)
    yield from (Method("lsgd", wire=wire) for wire in WIRES)
    yield Method("sparse-diloco", wire="sparse")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method with its periods, and the time that it takes.

    Attributes:
      method: the method.
      periods: steps between two exchanges of a parameter; LSGD's inside and global ones.
      exchanges: (seconds, steps between two of them) of each kind of exchange.
      sent: bytes that a worker sends per step, on average.
      peak: bytes that it sends in the largest exchange.
      step: seconds of a step without exchanges.
      steps: number of steps; None if unknown.
      settings: what laws have for the rate, the batch in tokens and the outer rate.
      loss: the loss that is expected.
    """

    method: Method
    periods: tuple[int, ...]
    exchanges: tuple[tuple[float, int], ...]
    sent: float
    peak: float
    step: float
    steps: int | None
    settings: Mapping[str, float]
    loss: laws.Loss

    @property
    def name(self) -> str:
        """A few words for a table."""
        method = self.method
        period = " and ".join(dict.fromkeys(map(str, self.periods)))
        words = [NAMES[method.name]]
        if method.name != "allreduce":
            words += ["every step" if period == "1" else f"every {period} steps"]
        words += [f"{method.fragments} fragments"] if method.fragments > 1 else []
        words += [f"delay {method.delay}"] if method.delay else []
        words += [method.wire] if method.wire in WIRES[1:] else []
        return ", ".join(words)

    @property
    def options(self) -> str:
        """The settings as options of the trainer."""
        method, found = self.method, {}
        if method.name == "lsgd":
            found["local-period"], found["global-period"] = self.periods
        elif method.name != "allreduce":
            found["period"] = self.periods[0]
        if method.fragments > 1:
            found["fragments"] = method.fragments
        if method.delay:
            found["delay"] = method.delay
        if method.wire in WIRES[1:]:
            found["wire"] = method.wire
        if "outer_rate" in self.settings:
            found["outer-learning-rate"] = self.settings["outer_rate"]
        own = (f" --method.{name} {value}" for name, value in found.items())
        return f"--method {method.name}{''.join(own)}"

    @property
    def pause(self) -> float:
        """Seconds of the longest wait."""
        return sum(self.exposed(seconds) for seconds, _ in self.exchanges)

    @property
    def wait(self) -> float:
        """Seconds of waiting per step, on average."""
        return sum(self.exposed(seconds) / every for seconds, every in self.exchanges)

    @property
    def share(self) -> float:
        """The share of the time that is spent waiting."""
        return self.wait / (self.step + self.wait)

    @property
    def seconds(self) -> float:
        """Seconds of the training, or of a step if the number of steps is unknown."""
        return (self.step + self.wait) * (self.steps or 1)

    @property
    def complexity(self) -> tuple[int, ...]:
        """What orders candidates from the simplest to the most elaborate."""
        method = self.method
        order = list(NAMES).index(method.name)
        wire = WIRES.index(method.wire) if method.wire in WIRES else 0
        return order, method.fragments, method.delay, wire, *self.periods

    def is_like(self, other: "Candidate") -> bool:
        """Whether a candidate has the same method and periods, and is not simpler."""
        if self is other or self.method.name != other.method.name:
            return False
        pairs = list(zip(self.complexity, other.complexity))
        return self.periods == other.periods and all(a >= b for a, b in pairs)

    def exposed(self, seconds: float) -> float:
        """The seconds of an exchange that are not hidden behind computing."""
        hides = BACKWARD if self.method.name == "allreduce" else min(self.method.delay, 1)
        return max(0.0, seconds - hides * self.step)


NAMES = {
    "allreduce": "data parallel",
    "diloco": "DiLoCo",
    "local-sgd": "local SGD",
    "lsgd": "LSGD",
    "sparse-diloco": "sparse DiLoCo",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """The training to plan for.

    Attributes:
      parameters: number of parameters.
      links: the network of each level; levels with one worker are left out.
      step: seconds of a training step without exchanges; None if `flops` decides.
      steps: number of steps; None if unknown.
      tokens: number of tokens; None if unknown.
      flops: operations per second of all workers together.
      batch: tokens in a step of all workers; None for those of a law.
      leaves: number of leaves of the parameters; None if unknown.
    """

    parameters: float
    links: Mapping[str, Link]
    step: float | None = None
    steps: int | None = None
    tokens: float | None = None
    flops: float | None = None
    batch: float | None = None
    leaves: int | None = None

    @property
    def widest(self) -> Link:
        """The link among all workers."""
        return self.links.get(ALL) or self.links[INSIDE]

    @property
    def replicas(self) -> int:
        """The number of workers."""
        return self.widest.workers

    def candidates(self, share: float) -> list[Candidate]:
        """All methods with periods that suit the link, the fastest first.

        A method with a law has the shortest period for which a law was fitted or measured,
        and longer ones as long as workers wait more than this share of the time. Other
        methods have the shortest power of two with which they wait no more.
        """
        found = [x for m in methods(self.leaves) for x in self._with_periods(m, share)]
        return sorted(found, key=lambda x: x.seconds)  # stable: the simplest first

    def _with_periods(self, method: Method, share: float) -> Iterator[Candidate]:
        if method.name == "allreduce":
            yield self.candidate(method, (1,))
            return
        if method.name == "diloco" and self.tokens is not None:
            for period in KNOWN:
                yield (found := self.candidate(method, (period,)))
                if found.share <= share:
                    return
        periods = self._shortest(method, share)
        if method.name != "diloco" or self.tokens is None or periods[0] > KNOWN[-1]:
            yield self.candidate(method, periods)

    def _shortest(self, method: Method, share: float) -> tuple[int, ...]:
        """The shortest periods with which workers wait at most this share of the time.

        LSGD's levels get half of the time each, and the outer period is not shorter. A
        fragment is due after more steps than the delay.
        """
        least, levels = method.fragments * (1 + method.delay), 1 + (method.name == "lsgd")
        least = max(least, SPARSE * (method.wire == "sparse"))
        one, periods = self.candidate(method, (least,) * levels), []
        most = LONGEST
        while one.steps is not None and most > max(1, one.steps // RARELY):
            most //= 2
        allowed = share / (1 - share) * one.step
        for seconds, _ in one.exchanges:
            each = len(one.exchanges) * method.fragments * one.exposed(seconds)
            least = max(least, power_of_two(min(each / allowed, most)))
            periods.append(least)
        return tuple(periods[-1:] * (levels - len(periods)) + periods)

    def candidate(self, method: Method, periods: tuple[int, ...]) -> Candidate:
        """A method with these periods."""
        step, steps, settings = self._pace(method, periods[-1])
        exchanges, sent, peak = self._exchanges(method, periods)
        if self.tokens is None:
            loss = laws.none("the number of tokens is not known")
        else:
            given = self.parameters, self.tokens, self.replicas
            loss = laws.loss(*given, method.name, periods[-1])
        return Candidate(
            method, periods, exchanges, sent, peak, step, steps, settings, loss
        )

    def _pace(
        self, method: Method, period: int
    ) -> tuple[float, int | None, Mapping[str, float]]:
        """Seconds of a step, number of steps, and settings that laws have."""
        settings: dict[str, float] = {}
        if self.tokens is not None:
            given = self.parameters, self.replicas, method.name, period
            settings = laws.settings(*given)
            settings["batch"] = self.batch or settings["batch"]
        if self.flops is None:
            assert self.step is not None
            return self.step, self.steps, settings
        assert self.tokens is not None
        steps = math.ceil(self.tokens / settings["batch"])
        total = 6 * self.parameters * self.tokens / self.flops
        return total / steps, steps, settings

    def _exchanges(
        self, method: Method, periods: tuple[int, ...]
    ) -> tuple[tuple[tuple[float, int], ...], float, float]:
        """The exchanges of a method, and a worker's bytes per step and in one of them."""
        if method.name == "lsgd":
            levels = self.links.get(INSIDE), self.widest
            uses = [(x, p) for x, p in zip(levels, periods) if x is not None]
        else:
            uses = [(self.widest, periods[0])]
        kind = "leader" if method.name == "lsgd" else "mean"
        exchanges, sent, peak = [], 0.0, 0.0
        for link, period in uses:
            each = self._seconds(link, kind, method)
            exchanges.append((each, period // method.fragments))
            whole = link.sent(self.parameters, method.wire)
            sent, peak = sent + whole / period, max(peak, whole / method.fragments)
        return tuple(exchanges), sent, peak

    def _seconds(self, link: Link, kind: str, method: Method) -> float:
        """Seconds of an exchange of a fragment. Each has its own latencies."""
        whole = link.seconds(kind, self.parameters, method.wire)
        nothing = min(whole, link._replace(measured={}).seconds(kind, 0.0, method.wire))
        return nothing + (whole - nothing) / method.fragments


def power_of_two(least: float) -> int:
    """The smallest power of two that is at least 1 and at least `least`.

    >>> power_of_two(0.3), power_of_two(16), power_of_two(17)
    (1, 16, 32)
    """
    return 2 ** max(0, math.ceil(math.log2(max(least, 1))))
