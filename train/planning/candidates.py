"""Methods with their settings, and the time that training takes with each of them.

Candidates run in lock step. A delay of one step hides as much as a step computes, or as its
compiled program does. With a longer one messages travel beside the steps, and it hides what
so many steps compute. Data parallel gets the best case: gradients are sent layer by layer
during the backward pass, which is two thirds of a step (see `bandwidth`). Where workers
differ, times are simulated (see `engine`), and asynchronous methods are candidates, too.
"""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from train.config import methods as trained
from train.config.methods import MethodConfig
from train.planning import engine, laws
from train.planning.periods import ChangingPeriod, Period, average


FRAGMENTS = 1, 4, 16
WIRES = "float32", "int8", "int4"
BACKWARD = 2 / 3  # the share of a step in which gradients become ready
ASYNCHRONOUS = "async-diloco", "decoupled-diloco"


class MethodVariant(NamedTuple):
    """A method and its settings, except for its periods.

    Attributes:
      name: as in the trainer.
      fragments, delay, wire: as in the trainer; 'sparse' is the wire of sparse-diloco.
    """

    name: str
    fragments: int = 1
    delay: int = 0
    wire: str = "float32"


def methods(leaves: int | None = None) -> Iterator[MethodVariant]:
    """Yields the methods that a plan compares, the simplest first.

    Args:
      leaves: number of leaves of the parameters, the limit for the number of fragments.
    """
    yield MethodVariant("allreduce")
    for wire in WIRES:
        for fragments in FRAGMENTS:
            if fragments <= (leaves or fragments):
                yield from (MethodVariant("diloco", fragments, d, wire) for d in (0, 1))
    yield from (MethodVariant("local-sgd", wire=wire) for wire in WIRES)
    yield from (MethodVariant("lsgd", wire=wire) for wire in WIRES)
    yield MethodVariant("sparse-diloco", wire="sparse")


def asynchronous(leaves: int | None = None) -> Iterator[MethodVariant]:
    """Yields the methods that a plan compares where workers differ, the simplest first."""
    fragments = min(engine.LEAVES, leaves or engine.LEAVES)
    yield from (MethodVariant("async-diloco", wire=wire) for wire in WIRES[:2])
    yield from (MethodVariant("decoupled-diloco", fragments, 0, wire) for wire in WIRES[:2])


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method with its periods, and the time that it takes.

    Attributes:
      method: the method.
      periods: steps between two exchanges of a parameter; LSGD's inside and global ones.
      exchanges: (seconds, steps between two of them) of each kind of exchange. Where a
        period changes, the steps are their average over the run.
      sent: bytes that a worker sends per step, on average.
      peak: bytes that it sends in the largest exchange.
      step: seconds of a step without exchanges.
      steps: number of steps; None if unknown.
      settings: what laws have for the rate, the batch in tokens and the outer rate.
      loss: the loss that is expected.
      pace: simulated, where workers differ.
      hides: the share of a step's computing that hides an exchange with a delay of a step.
    """

    method: MethodVariant
    periods: tuple[Period, ...]
    exchanges: tuple[tuple[float, float], ...]
    sent: float
    peak: float
    step: float
    steps: int | None
    settings: Mapping[str, float]
    loss: laws.Loss
    pace: engine.SimulatedPace | None = None
    hides: float = 1.0

    @property
    def name(self) -> str:
        """A few words for a table."""
        return ", ".join([NAMES[self.method.name], *self.words])

    @property
    def words(self) -> list[str]:
        """The periods and the settings of the method."""
        method = self.method
        words = []
        if method.name != "allreduce":
            words.append(_often(self.periods))
        if method.fragments > 1:
            words.append(f"{method.fragments} fragments")
        if method.delay:
            words.append(f"delay {method.delay}")
        if method.wire in WIRES[1:]:
            words.append(method.wire)
        return words

    @property
    def options(self) -> str:
        """The settings as options of the trainer."""
        given = dict(self._given)
        if "outer_rate" in self.settings:
            given["outer_learning_rate"] = self.settings["outer_rate"]
        words = [f"--method {self.method.name}"]
        for name, value in given.items():
            words.append(f"--method.{name.replace('_', '-')} {shlex.quote(str(value))}")
        return " ".join(words)

    @property
    def _given(self) -> dict[str, Any]:
        """The settings that differ from the trainer's, and the periods."""
        method = self.method
        given: dict[str, Any] = {}
        if method.name == "lsgd":
            given["local_period"], given["global_period"] = self.periods
        elif method.name in ASYNCHRONOUS:
            given["local_steps"] = self.periods[0]
        elif method.name != "allreduce":
            given["period"] = self.periods[0]
        if method.fragments > 1:
            given["fragments"] = method.fragments
        if method.delay:
            given["delay"] = method.delay
        if method.wire in WIRES[1:]:
            given["wire"] = method.wire
        return given

    @property
    def trained(self) -> MethodConfig:
        """The method of the trainer."""
        given = dict(self._given)
        for name, value in given.items():
            if isinstance(value, ChangingPeriod):
                given[name] = str(value.pieces)
        return trained.make(self.method.name, **given)

    @property
    def is_possible(self) -> bool:
        """Whether the method takes these settings together, as far as it knows them."""
        try:
            if self.method.name in ASYNCHRONOUS:
                self.trained.asynchronous()
            else:
                self.trained.exchanges(1.0, self.steps)
        except ValueError:
            return False
        return True

    @property
    def pause(self) -> float:
        """Seconds of the longest wait."""
        if self.pace is not None:
            return self.pace.pause
        return sum(self.exposed(seconds) for seconds, _ in self.exchanges)

    @property
    def wait(self) -> float:
        """Seconds per step beside computing, on average."""
        if self.pace is not None:
            return self.pace.step - self.step
        return sum(self.exposed(seconds) / every for seconds, every in self.exchanges)

    @property
    def share(self) -> float:
        """The share of the time that is spent waiting."""
        if self.pace is not None:
            return self.pace.waiting
        return self.wait / (self.step + self.wait)

    @property
    def seconds(self) -> float:
        """Seconds of the training, or of a step if the number of steps is unknown."""
        each = self.step + self.wait
        if self.steps is None:
            return each
        extra = 0.0 if self.pace is None else self.pace.extra
        return each * self.steps + extra

    @property
    def complexity(self) -> tuple[float, ...]:
        """The key that orders candidates from the simplest to the most elaborate."""
        method = self.method
        order = list(NAMES).index(method.name)
        wire = WIRES.index(method.wire) if method.wire in WIRES else 0
        return order, method.fragments, method.delay, wire, *map(average, self.periods)

    def is_like(self, other: "Candidate") -> bool:
        """Whether a candidate has the same method and periods, and is not simpler."""
        if self is other or self.method.name != other.method.name:
            return False
        pairs = list(zip(self.complexity, other.complexity))
        return self.periods == other.periods and all(a >= b for a, b in pairs)

    def exposed(self, seconds: float) -> float:
        """The seconds of an exchange that are not hidden behind computing."""
        if self.method.name == "allreduce":
            steps = BACKWARD
        elif self.method.delay == 1:
            steps = self.hides
        else:
            steps = self.method.delay
        return max(0.0, seconds - steps * self.step)


def _often(periods: tuple[Period, ...]) -> str:
    """How often workers exchange, in words."""
    different = dict.fromkeys(periods)
    if any(isinstance(period, ChangingPeriod) for period in different):
        return "period " + " and ".join(f"'{period}'" for period in different)
    if tuple(different) == (1,):
        return "every step"
    return f"every {' and '.join(map(str, different))} steps"


NAMES = {
    "allreduce": "data parallel",
    "diloco": "DiLoCo",
    "local-sgd": "local SGD",
    "lsgd": "LSGD",
    "sparse-diloco": "sparse DiLoCo",
    "async-diloco": "asynchronous DiLoCo",
    "decoupled-diloco": "Decoupled DiLoCo",
}
