"""The training to plan for, and the periods and times of its candidates."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import lsgd_jax as lj
from train.planning import engine, laws
from train.planning.candidates import (
    ASYNCHRONOUS,
    Candidate,
    MethodVariant,
    asynchronous,
    methods,
)
from train.planning.links import WIRES, Link
from train.planning.periods import GivenPeriod, Period, average, constant
from train.planning.unequal import Unequal


# The levels of a network.
INSIDE = "inside the node"
ACROSS = "across nodes"
ALL = "all workers"

KNOWN = (32, 96)  # periods near those with a law, 30 and 100, that fragments divide
LONGEST = 1024  # the longest period
RARELY = 10  # the fewest exchanges of a run
# A period is so many times as long as a delay of several steps, which an exchange drops.
PERIOD_OF_DELAYS = 4
SPARSE = 32  # the shortest period of sparse-diloco; its default is 30


class LevelExchange(NamedTuple):
    """The mean of all parameters in float32 over the workers of a level, without a method.

    Attributes:
      level: name of the level.
      workers: their number.
      seconds: of the exchange.
      bytes_per_second: the parameters over these seconds.
      latency_seconds: the share of the seconds that does not depend on the size.
    """

    level: str
    workers: int
    seconds: float
    bytes_per_second: float
    latency_seconds: float


@dataclasses.dataclass(frozen=True)
class Scenario:
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
      period: of all methods; None for periods that suit the links.
      unequal: how workers differ; None if they do not.
      chips: number of all chips.
      hides: the share of a step behind which a message with a delay is hidden in the
        compiled programs, by whether it has few bits; all of it if nothing was compiled.
      tell: called with the name of each candidate that has been simulated.
    """

    parameters: float
    links: Mapping[str, Link]
    step: float | None = None
    steps: int | None = None
    tokens: float | None = None
    flops: float | None = None
    batch: float | None = None
    leaves: int | None = None
    period: GivenPeriod | None = None
    unequal: Unequal | None = None
    chips: int = 1
    hides: Mapping[bool, float] = dataclasses.field(default_factory=dict)
    tell: Callable[[str], object] = lambda name: None

    @property
    def widest(self) -> Link:
        """The link among all workers."""
        return self.links.get(ALL) or self.links[INSIDE]

    @property
    def replicas(self) -> int:
        """The number of workers."""
        return self.widest.workers

    def exchanges(self) -> Iterator[LevelExchange]:
        """Yields the exchange of each level."""
        for level, link in self.links.items():
            seconds = link._replace(measured={}).seconds("mean", self.parameters)
            yield LevelExchange(
                level=level,
                workers=link.workers,
                seconds=seconds,
                bytes_per_second=4 * self.parameters / seconds,
                latency_seconds=link.network.all_reduce(link.workers, 0),
            )

    def candidates(self, share: float) -> list[Candidate]:
        """All methods with periods that suit the link, the fastest first.

        A method with a law has the shortest period for which a law was fitted or measured,
        and longer ones as long as workers wait more than this share of the time. Other
        methods have the shortest power of two with which they wait no more. A given period
        is that of all methods that can have it. DiLoCo comes with a delay of several steps,
        too, if its exchanges take as long.
        """
        compared = list(methods(self.leaves))
        compared += filter(None, map(self._hidden, compared))
        found = [x for m in compared for x in self._with_periods(m, share)]
        found = [self._simulated(x) for x in found]
        if self.unequal is not None:
            for method in asynchronous(self.leaves):
                found += map(self._simulated, self._free_running(method))
        return sorted(found, key=lambda x: x.seconds)  # stable: the simplest first

    def _hidden(self, method: MethodVariant) -> MethodVariant | None:
        """DiLoCo with the delay of several steps that hides its exchanges, or None."""
        if method.name != "diloco" or method.delay:
            return None
        one = self._of_equals(method, (KNOWN[0],))
        ((seconds, _),) = one.exchanges
        delay = math.ceil(seconds / one.step)
        longest = LONGEST
        if self.period is not None:
            given = constant(self.period.over(one.steps))
            longest = 0 if given is None else given
        fits = min(longest // PERIOD_OF_DELAYS, longest // method.fragments - 1)
        delay = min(delay, fits)
        return method._replace(delay=delay) if delay > 1 else None

    def _with_periods(self, method: MethodVariant, share: float) -> Iterator[Candidate]:
        if method.name == "allreduce":
            yield self._of_equals(method, (1,))
            return
        if self.period is not None:
            yield from self._with_the_given(method, self.period)
            return
        has_law = method.name == "diloco" and method.delay <= 1 and self.tokens is not None
        if has_law:
            for period in KNOWN:
                found = self._of_equals(method, (period,))
                yield found
                if found.share <= share:
                    return
        periods = self._shortest(method, share)
        if not has_law or periods[0] > KNOWN[-1]:
            yield self._of_equals(method, periods)

    def _with_the_given(
        self, method: MethodVariant, given: GivenPeriod
    ) -> Iterator[Candidate]:
        """The method with the given period, or nothing if it cannot have it."""
        steps = self._pace(method, None)[1]
        period = given.over(steps)
        levels = 2 if method.name == "lsgd" else 1
        found = self._of_equals(method, (period,) * levels)
        if found.is_possible:
            yield found

    def _free_running(self, method: MethodVariant) -> Iterator[Candidate]:
        """The asynchronous method."""
        if self.period is not None:
            yield from self._with_the_given(method, self.period)
        else:
            yield self._of_equals(method, (self._shortest_free(method),))

    def _shortest_free(self, method: MethodVariant) -> int:
        """The shortest period from a law's on for which the link is fast enough.

        All workers exchange once in a period: each sends anchor and momentum to another.
        """
        size = 2 * self.replicas * self.parameters * WIRES[method.wire]
        step = self._pace(method, KNOWN[0])[0]
        seconds = size / self.widest.network.bandwidth
        return min(power_of_two(max(KNOWN[0], seconds / step)), LONGEST)

    def _shortest(self, method: MethodVariant, share: float) -> tuple[int, ...]:
        """The shortest periods with which workers wait at most this share of the time.

        LSGD's levels get half of the time each, and the outer period is not shorter. A
        fragment is due after more steps than the delay, and a delay of several steps is a
        small share of the period.
        """
        levels = 2 if method.name == "lsgd" else 1
        least = method.fragments * (1 + method.delay)
        if method.wire == "sparse":
            least = max(least, SPARSE)
        if method.delay > 1:
            least = power_of_two(max(least, PERIOD_OF_DELAYS * method.delay))
        one = self._of_equals(method, (least,) * levels)
        most = LONGEST
        while one.steps is not None and most > max(1, one.steps // RARELY):
            most //= 2
        allowed = share / (1 - share) * one.step
        periods = []
        for seconds, _ in one.exchanges:
            each = len(one.exchanges) * method.fragments * one.exposed(seconds)
            least = max(least, power_of_two(min(each / allowed, most)))
            periods.append(least)
        if len(periods) < levels:  # the grid has one level, and LSGD has both pulls in it
            return (least, least)
        return tuple(periods)

    def candidate(self, method: MethodVariant, periods: tuple[Period, ...]) -> Candidate:
        """A method with these periods."""
        return self._simulated(self._of_equals(method, periods))

    def _of_equals(self, method: MethodVariant, periods: tuple[Period, ...]) -> Candidate:
        """A method with these periods, among workers that do not differ."""
        last = constant(periods[-1])
        step, steps, settings = self._pace(method, last)
        exchanges, sent, peak = self._exchanges(method, periods)
        if self.tokens is None:
            loss = laws.none("the number of tokens is not known")
        elif method.delay > 1:
            loss = laws.none("measured for a delay of a step at most")
        else:
            loss = laws.loss(self.parameters, self.tokens, self.replicas, method.name, last)
        return Candidate(
            method=method,
            periods=periods,
            exchanges=exchanges,
            sent=sent,
            peak=peak,
            step=step,
            steps=steps,
            settings=settings,
            loss=loss,
            hides=self.hides.get(method.wire != "float32", 1.0),
        )

    def _pace(
        self, method: MethodVariant, period: int | None
    ) -> tuple[float, int | None, Mapping[str, float]]:
        """Seconds of a step, number of steps, and settings that laws have.

        period: None if it changes.
        """
        settings: dict[str, float] = {}
        if self.tokens is not None:
            settings = laws.settings(self.parameters, self.replicas, method.name, period)
            if self.batch is not None:
                settings["batch"] = self.batch
        if self.flops is None:
            assert self.step is not None
            return self.step, self.steps, settings
        assert self.tokens is not None
        steps = math.ceil(self.tokens / settings["batch"])
        total = 6 * self.parameters * self.tokens / self.flops
        return total / steps, steps, settings

    def _exchanges(
        self, method: MethodVariant, periods: tuple[Period, ...]
    ) -> tuple[tuple[tuple[float, float], ...], float, float]:
        """The exchanges of a method, and a worker's bytes per step and in one of them."""
        if method.name in ASYNCHRONOUS:
            return (), 0.0, 0.0
        if method.name == "lsgd":
            kind = "leader"
            levels = (self.links.get(INSIDE), self.widest)
            uses = [(x, p) for x, p in zip(levels, periods) if x is not None]
        else:
            kind = "mean"
            uses = [(self.widest, periods[0])]
        exchanges = []
        sent = 0.0
        peak = 0.0
        for link, period in uses:
            if average(period) == math.inf:
                continue  # the run is shorter than the first period
            each = link.seconds(kind, self.parameters, method.wire, method.fragments)
            exchanges.append((each, average(period) / method.fragments))
            whole = link.sent(self.parameters, method.wire)
            sent += whole / average(period)
            peak = max(peak, whole / method.fragments)
        return tuple(exchanges), sent, peak

    def _simulated(self, found: Candidate) -> Candidate:
        """The candidate at the pace that the engine finds, where workers differ."""
        if self.unequal is None:
            return found
        locals = self.links[INSIDE].workers if INSIDE in self.links else 1
        grid = (self.replicas // locals, locals)
        period = constant(found.periods[-1])
        assert period is not None  # `PlanOptions.check` refuses it where workers differ
        if found.method.name in ASYNCHRONOUS:
            pace = engine.free_running(
                found.trained.asynchronous(),
                period,
                self._network,
                self.parameters,
                grid,
                found.step,
                self.unequal,
            )
            nbytes = 4 * self.parameters
            simulated = dataclasses.replace(
                found, pace=pace, sent=nbytes * pace.sent, peak=nbytes * pace.peak
            )
        else:
            pace = engine.lock_step(_timed(found), grid, found.step, self.unequal)
            simulated = dataclasses.replace(found, pace=pace)
        self.tell(found.name)
        return simulated

    @property
    def _network(self) -> lj.asynchronous.Network:
        """The links across and inside nodes."""
        across = self.widest.network
        inside = self.links.get(INSIDE, self.widest).network
        return lj.asynchronous.Network(
            across.bandwidth, across.latency, inside.bandwidth, inside.latency
        )


def _timed(found: Candidate) -> list[engine.TimedExchange]:
    """The exchanges of a candidate in lock step. All but the last are inside a node."""
    delay = found.method.delay
    inside = [("local",)] * (len(found.exchanges) - 1)
    timed = []
    for (seconds, every), axes in zip(found.exchanges, [*inside, ("node", "local")]):
        if not delay:
            seconds = found.exposed(seconds)
        timed.append(engine.TimedExchange(seconds, round(every), delay, axes))
    return timed


def power_of_two(least: float) -> int:
    """The smallest power of two that is at least 1 and at least `least`.

    >>> power_of_two(0.3), power_of_two(16), power_of_two(17)
    (1, 16, 32)
    """
    return 2 ** max(0, math.ceil(math.log2(max(least, 1))))
