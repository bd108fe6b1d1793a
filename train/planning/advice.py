"""What a plan says: the table of its candidates, one sentence, JSON and a picture."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from train.metrics.drawing import plain_numbers, save, subplots
from train.planning import laws
from train.planning.candidates import NAMES, Candidate, MethodVariant
from train.planning.links import Link
from train.planning.scenario import KNOWN, Scenario


LINES = 16  # of the table
HOUR = 3600.0


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
        (arXiv:2503.09799, Figure 15). Then the order of `methods` decides.
        """
        slower = 1 + self.share  # that many times slower counts as equally fast
        if self.base.seconds <= slower * self.candidates[0].seconds:
            return self.base
        some = [x for x in self.candidates if x.loss.more is not None]
        if len(some) < 2:  # data parallel alone has a law
            some = self.candidates
        close = [x for x in some if x.seconds <= slower * some[0].seconds]
        return min(close, key=lambda x: (_cost(x), *x.complexity))

    def sentence(self) -> str:
        """The advice in one sentence."""
        base = self.base
        best = self.best
        if best is base:
            return (
                "use data parallel: the link is fast enough (it waits "
                f"{100 * base.share:.2g} % of the time)"
            )
        times = number(base.seconds / best.seconds)
        found = f"use {best.name}: {times} times faster than data parallel at this link"
        if best.loss.more is None:
            return f"{found}; no law says for how many nats"
        cost = f"{best.loss.more:+.3f} nats (± {best.loss.more_error:.3f})"
        return f"{found}, for about {cost}"

    def remarks(self) -> Iterator[str]:
        """Yields the options of the advice, and what would be faster or have less loss."""
        best = self.best
        fastest = self.candidates[0]
        yield f"options of python -m train: {best.options}"
        if best is self.base:
            return
        others = [x for x in self.candidates if x is not self.base]
        others = [x for x in others if x.loss.more is not None]
        least = min(others, key=lambda x: (x.loss.more, x.seconds), default=best)
        if least.loss.more != best.loss.more:
            times = number(least.seconds / best.seconds)
            yield f"for {least.loss.more:+.3f} nats: {least.name}, {times} times slower"
        if best.seconds > (1 + self.share) * fastest.seconds:
            times = number(best.seconds / fastest.seconds)
            yield (
                f"{fastest.name} would be {times} times faster still, but no law says for "
                "how many nats"
            )

    # Output

    def shown(self) -> list[Candidate]:
        """The candidates of the table: those that gain over simpler ones."""
        must = [self.base, self.best]
        some = [x for x in self.candidates if self._gains(x) and x not in must]
        shown = [*some[: LINES - len(must)], *must]
        return sorted({id(x): x for x in shown}.values(), key=lambda x: x.seconds)

    def _gains(self, found: Candidate) -> bool:
        """Whether a candidate is faster than all that are like it and simpler."""
        limit = (1 + self.share) * found.seconds
        return not any(found.is_like(x) and x.seconds <= limit for x in self.candidates)

    def rows(self) -> list[dict[str, str]]:
        """The rows of the table."""
        return [self._row(x) for x in self.shown()]

    def _row(self, found: Candidate) -> dict[str, str]:
        scenario = self.scenario
        if found.steps is None:
            time = {"ms a step": number(1e3 * found.seconds)}
            sent = {"MB a step": number(found.sent / 1e6)}
        else:
            time = {"hours": number(found.seconds / HOUR)}
            sent = {"GB sent": number(found.sent * found.steps / 1e9)}
        row = {"method": found.name, **time, "waiting, %": number(100 * found.share)}
        row |= {"longest wait, s": number(found.pause)}
        row |= {**sent, "peak MB": number(found.peak / 1e6)}
        row |= {name: number(value) for name, value in self._bills(found).items()}
        if scenario.tokens is not None and found.settings:
            settings = found.settings
            row["batch, tokens"] = number(settings["batch"])
            row["inner rate"] = f"{settings['rate']:.2g}" if "rate" in settings else ""
            row["outer rate"] = f"{settings.get('outer_rate', '')}"
            row |= _losses(found.loss)
        return row

    def _bills(self, found: Candidate) -> dict[str, float]:
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

    def notes(self) -> Iterator[str]:
        """Yields the sources of the numbers, and where there is none."""
        yield from self.sources
        scenario = self.scenario
        if scenario.tokens is None:
            return
        by_source: dict[str, dict[str, None]] = {}  # the names in order, each once
        for found in self.shown():
            names = by_source.setdefault(found.loss.source, {})
            names[NAMES[found.method.name]] = None
        for source, names in by_source.items():
            yield f"loss of {', '.join(names)}: {source}"
        known = [x.method for x in self.shown() if x.loss.more is not None]
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
            "sources": list(self.notes()),
            "candidates": [self._record(x) for x in self.candidates],
        }

    def _record(self, found: Candidate) -> dict[str, Any]:
        steps = found.steps
        hours = None if steps is None else found.seconds / HOUR
        bills = self._bills(found)
        return {
            "name": found.name,
            "options": found.options,
            "periods": list(found.periods),
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
        scenario = self.scenario
        here = scenario.widest.network
        count = 41 if scenario.unequal is None else 9  # each of which is simulated
        rates = here.bandwidth * np.logspace(-2, 2, count)
        figure, axes = subplots(figsize=(7, 4.5))
        unit = 1e-3 if self.base.steps is None else HOUR
        diloco = [x for x in self.candidates if x.method == MethodVariant("diloco")]
        shortest = min(diloco, key=lambda x: x.periods)
        lines = [self.base, shortest, self.best, self.candidates[0]]
        for found in {x.name: x for x in lines}.values():
            times = [self._at(found, rate).seconds / unit for rate in rates]
            axes.plot(rates * 8 / 1e6, times, label=found.name)
        axes.axvline(here.bandwidth * 8 / 1e6, color="gray", lw=1, ls=":")
        axes.set(xscale="log", yscale="log", xlabel="Mbit/s of each site")
        axes.set_ylabel("hours" if unit == HOUR else "ms a step")
        plain_numbers(axes.yaxis)
        axes.legend(frameon=False, fontsize=8)
        save(figure, path)

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
        return max(found.periods[-1], KNOWN[0])
    return found.loss.more


def _losses(loss: laws.Loss) -> dict[str, str]:
    """The loss in the cells of a row."""
    nats = "no law"
    more = ""
    if loss.nats is not None:
        nats = f"{loss.nats:.3f} ± {loss.error:.3f}"
    if loss.more is not None:
        more = f"{loss.more:+.3f}"
    return {"loss, nats": nats, "more nats": more}


def number(value: float) -> str:
    """A number with three digits, and no exponent if it is large.

    >>> number(1234567), number(1.2345), number(0.00012345)
    ('1,234,567', '1.23', '0.000123')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
