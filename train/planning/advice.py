"""The advice of a plan: one sentence, its remarks and sources, JSON and a picture."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from train.metrics.quantities import HOUR, duration, number
from train.planning import laws
from train.planning.candidates import NAMES, Candidate, MethodVariant
from train.planning.links import Link
from train.planning.periods import average, constant
from train.planning.scenario import KNOWN, Scenario
from train.process.messages import counted


@dataclasses.dataclass(frozen=True)
class Advice:
    """The candidates of a scenario.

    Attributes:
      scenario: the training.
      share: the share of the time that workers may wait, and that counts as equally fast.
      sources: sentences that say where the numbers come from.
      price: of a chip for an hour; None if unknown.
      watts: of a chip; None if unknown.
    """

    scenario: Scenario
    share: float
    sources: Sequence[str]
    price: float | None = None
    watts: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "candidates", self.scenario.candidates(self.share))

    candidates: list[Candidate] = dataclasses.field(init=False)

    @property
    def base(self) -> Candidate:
        """Data parallel."""
        return next(x for x in self.candidates if x.method.name == "allreduce")

    @property
    def best(self) -> Candidate:
        """The simplest of the fastest methods, of those with a law if there are any.

        Data parallel is the simplest. Of others with the same hours the lower loss counts,
        which without a law is that of the shorter period; up to 32 steps periods are alike
        (arXiv:2503.09799, Figure 15). Then those without a delay of several steps come
        first, as an exchange drops these steps, and the order of `methods` decides.
        """
        slower = 1 + self.share  # that many times slower counts as equally fast
        if self.base.seconds <= slower * self.candidates[0].seconds:
            return self.base
        some = [x for x in self.candidates if x.loss.more is not None]
        if len(some) < 2:  # data parallel alone has a law
            some = self.candidates
        close = [x for x in some if x.seconds <= slower * some[0].seconds]
        return min(close, key=lambda x: (_cost(x), x.method.delay > 1, *x.complexity))

    @property
    def least(self) -> Candidate:
        """The method with the least loss by a law, or the best one. Not data parallel."""
        others = [x for x in self.candidates if x is not self.base]
        others = [x for x in others if x.loss.more is not None]
        return min(others, key=lambda x: (x.loss.more, x.seconds), default=self.best)

    def gains(self, found: Candidate) -> bool:
        """Whether a candidate is faster than all that are like it and simpler."""
        limit = (1 + self.share) * found.seconds
        return not any(found.is_like(x) and x.seconds <= limit for x in self.candidates)

    def bills(self, found: Candidate) -> dict[str, float]:
        """The cost and the energy in kWh, as far as they are known."""
        if found.steps is None:
            return {}
        hours = self.scenario.chips * found.seconds / HOUR
        bills = {}
        if self.price is not None:
            bills["cost"] = hours * self.price
        if self.watts is not None:
            bills["kWh"] = hours * (self.watts / 1e3)
        return bills

    # Output

    def sentence(self) -> str:
        """The advice in one sentence."""
        base = self.base
        best = self.best
        time = _time(best)
        if best is base:
            waits = f"of which it waits {100 * base.share:.2g} %"
            return f"use data parallel: the link is fast enough ({time}, {waits})"
        found = (
            f"use {best.name}: {time} in place of {duration(base.seconds)} of data parallel"
        )
        if best.loss.more is None:
            return f"{found}; no published scaling law predicts its loss"
        cost = f"{best.loss.more:+.3f} nats (± {best.loss.more_error:.3f})"
        return f"{found}, for about {cost}"

    def remarks(self) -> Iterator[str]:
        """Yields the batch of the advice, and what would be faster or have less loss."""
        best = self.best
        least = self.least
        fastest = self.candidates[0]
        if "batch" in best.settings:
            batch = f"batch of all workers: {number(best.settings['batch'])} tokens"
            if "rate" in best.settings:
                batch += f"; inner learning rate: {best.settings['rate']:.2g}"
            yield batch
        if best is self.base:
            return
        if best.method.delay and best.pace is None:
            yield _of_delay(best)
        if least.loss.more != best.loss.more:
            yield f"for {least.loss.more:+.3f} nats: {least.name}, {_time(least)}"
        if best.seconds > (1 + self.share) * fastest.seconds:
            yield (
                f"faster still: {fastest.name}, {_time(fastest)}, but no published scaling "
                "law predicts its loss"
            )

    def notes(self, candidates: Sequence[Candidate]) -> Iterator[str]:
        """Yields the sources of the numbers of candidates, and where there is none."""
        yield from self.sources
        if any(x.method.delay > 1 for x in candidates):
            yield (
                "with a delay of several steps messages travel beside the steps, which was "
                "measured on CPUs alone; each exchange drops what the workers have learned "
                "in these steps (docs/slow_networks.md)"
            )
        scenario = self.scenario
        if scenario.tokens is None:
            return
        by_source: dict[str, dict[str, None]] = {}  # the names in order, each once
        for found in candidates:
            names = by_source.setdefault(found.loss.source, {})
            names[NAMES[found.method.name]] = None
        for source, names in by_source.items():
            yield f"loss of {', '.join(names)}: {source}"
        known = [x.method for x in candidates if x.loss.more is not None]
        if any((x.fragments, x.delay, x.wire) != (1, 0, "float32") for x in known):
            yield laws.STREAMED
        if laws.is_fitted(scenario.parameters, scenario.tokens, scenario.replicas):
            error = f"± {100 * laws.SETTINGS:.0f} %"
        else:
            error = "outside the range of their fits"
        yield (
            f"batches and inner rates: {laws.SCALING}, Tables 9 to 12, fitted for H = 30, "
            f"{error}; outer rates: Figure 5"
        )
        if scenario.batch is not None:
            yield "the batch is as given; losses and rates are for the laws' own batches"

    def to_json(self) -> dict[str, Any]:
        """All candidates and the advice, for JSON."""
        return {
            "advice": self.sentence(),
            "use": self.best.options,
            "remarks": list(self.remarks()),
            "sources": list(self.notes(self.candidates)),
            "exchanges": [x._asdict() for x in self.scenario.exchanges()],
            "candidates": [self._record(x) for x in self.candidates],
        }

    def _record(self, found: Candidate) -> dict[str, Any]:
        steps = found.steps
        hours = None if steps is None else found.seconds / HOUR
        bills = self.bills(found)
        return {
            "name": found.name,
            "options": found.options,
            "periods": [constant(x) or str(x) for x in found.periods],
            "fragments": found.method.fragments,
            "delay": found.method.delay,
            "wire": found.method.wire,
            "step_seconds": found.step,
            "wait_seconds": found.wait,
            "waiting": found.share,
            "longest_wait_seconds": found.pause,
            "steps": steps,
            "hours": hours,
            "cost": bills.get("cost"),
            "kwh": bills.get("kWh"),
            "bytes_per_step": found.sent,
            "peak_bytes": found.peak,
            **found.settings,
            "loss": found.loss._asdict(),
        }

    def draw(self, path: pathlib.Path) -> None:
        """Plots hours against bandwidth, with the link of the plan marked, as a PNG."""
        from train.metrics import drawing  # importing Matplotlib takes a second

        scenario = self.scenario
        here = scenario.widest.network
        count = 41 if scenario.unequal is None else 9  # each of which is simulated
        rates = here.bandwidth * np.logspace(-2, 2, count)
        figure, axes = drawing.subplots(figsize=(7, 4.5))
        unit = 1e-3 if self.base.steps is None else HOUR
        diloco = [x for x in self.candidates if x.method == MethodVariant("diloco")]
        shortest = min(diloco, key=lambda x: average(x.periods[-1]))
        lines = [self.base, shortest, self.best, self.candidates[0]]
        for found in {x.name: x for x in lines}.values():
            times = [self._at(found, rate).seconds / unit for rate in rates]
            axes.plot(rates * 8 / 1e6, times, label=found.name)
        axes.axvline(here.bandwidth * 8 / 1e6, color="gray", lw=1, ls=":")
        axes.set(xscale="log", yscale="log", xlabel="Mbit/s of each site")
        axes.set_ylabel("hours" if unit == HOUR else "ms a step")
        drawing.plain_numbers(axes.yaxis)
        axes.legend(frameon=False, fontsize=8)
        drawing.save(figure, path)

    def _at(self, found: Candidate, bandwidth: float) -> Candidate:
        """A candidate on a link of another bandwidth."""
        links = {
            name: Link(dataclasses.replace(link.network, bandwidth=bandwidth), link.workers)
            for name, link in self.scenario.links.items()
        }
        other = dataclasses.replace(self.scenario, links=links)
        return other.candidate(found.method, found.periods)


def _cost(found: Candidate) -> float:
    """The nats that a method costs; its period where no law gives them."""
    if found.loss.more is None:
        return max(average(found.periods[-1]), KNOWN[0])
    return found.loss.more


def _of_delay(found: Candidate) -> str:
    """How much of an exchange a delay hides."""
    seconds = max(seconds for seconds, _ in found.exchanges)
    left = found.exposed(seconds)
    exchange = "the exchange of a fragment" if found.method.fragments > 1 else "an exchange"
    delay = f"the delay of {counted(found.method.delay, 'step')}"
    end = f"hidden by {delay}"
    if left:
        end = f"{delay} hides {duration(seconds - left)}, {duration(left)} is left"
    return f"{exchange} takes {duration(seconds)}: {end}"


def _time(found: Candidate) -> str:
    """The time of the training, or of a step if the number of steps is unknown."""
    time = duration(found.seconds)
    return f"{time} a step" if found.steps is None else time
