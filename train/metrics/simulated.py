"""What simulated runs have shown: their table, and one figure of them all."""

import collections
import dataclasses
import pathlib
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt

from train.metrics import measures
from train.metrics.plots import tidy


BINS = 100  # of the simulated time, over which losses are averaged


class Step(NamedTuple):
    """One step of one worker, when it had ended.

    waited: seconds in all so far. staleness: of what it was last mixed with, in steps.
    """

    seconds: float
    worker: int
    step: int
    loss: float
    waited: float
    staleness: float


@dataclasses.dataclass
class Recorded:
    """A simulated run.

    Attributes:
      name: of the method.
      steps: of all workers, in the order of time.
      seconds: simulated, until the last worker had ended.
      waited: of each worker, seconds.
      bytes_sent: by each worker.
      across: bytes that left each node.
      tested: the consensus at the end.
      wall: seconds that the simulation took.
    """

    name: str
    steps: list[Step]
    seconds: float
    waited: list[float]
    bytes_sent: list[int]
    across: list[float]
    tested: dict[str, float]
    wall: float

    @property
    def per_100_steps(self) -> float:
        """Seconds per 100 steps of a worker."""
        return 100 * self.seconds * len(self.waited) / max(len(self.steps), 1)

    @property
    def waiting(self) -> float:
        """The share of the time that the workers waited."""
        return float(np.mean(self.waited)) / self.seconds if self.seconds else 0.0

    @property
    def staleness(self) -> dict[int, int]:
        """How many steps there were of each staleness, rounded to whole steps."""
        count = collections.Counter(round(step.staleness) for step in self.steps)
        return dict(sorted(count.items()))

    def row(self) -> dict[str, Any]:
        """Its row of the table."""
        measure = measures.shown(self.tested)[0]
        stale = [step.staleness for step in self.steps]
        return {
            "method": self.name,
            "simulated s": f"{self.seconds:.4g}",
            "s / 100 steps": f"{self.per_100_steps:.4g}",
            "waiting, %": f"{100 * self.waiting:.1f}",
            "staleness, mean": f"{np.mean(stale) if stale else 0:.2f}",
            "MB sent / worker": f"{np.mean(self.bytes_sent) / 1e6:.3g}",
            measure.label: f"{self.tested[measure.key]:.{measure.digits}f}",
        }

    def summary(self) -> dict[str, Any]:
        """What is kept of it as JSON."""
        kept = dataclasses.asdict(self)
        del kept["steps"]
        more = {"per_100_steps": self.per_100_steps, "waiting": self.waiting}
        return {**kept, **more, "staleness": self.staleness}

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, loss): the mean of the steps that ended in each part of the time."""
        seconds = np.array([step.seconds for step in self.steps])
        loss = np.array([step.loss for step in self.steps])
        edges = np.linspace(0, self.seconds, BINS + 1)
        place = np.clip(np.digitize(seconds, edges) - 1, 0, BINS - 1)
        count = np.bincount(place, minlength=BINS)
        with np.errstate(invalid="ignore"):
            mean = np.bincount(place, weights=loss, minlength=BINS) / count
        return edges[1:][count > 0], mean[count > 0]


def draw(runs: list[Recorded], path: pathlib.Path) -> None:
    """Loss against simulated seconds, waiting by worker, staleness and bytes, as a PNG."""
    figure, grid = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    (loss, waiting), (staleness, sent) = grid
    for run in runs:
        loss.plot(*run.curve(), label=run.name)
        share = np.divide(run.waited, run.seconds or 1)
        waiting.plot(100 * share, marker=".", lw=0.8, label=run.name)
        count = run.staleness
        staleness.plot(list(count), list(count.values()), marker=".", label=run.name)
    names = [run.name for run in runs]
    across = [float(np.mean(run.across)) / 1e6 for run in runs]
    sent.bar(names, across)
    loss.set(xlabel="simulated seconds", ylabel="training loss, mean of workers")
    loss.set_yscale("log")
    loss.legend(frameon=False)
    waiting.set(xlabel="worker", ylabel="time spent waiting, %")
    staleness.set(xlabel="staleness, steps", ylabel="steps")
    staleness.set_yscale("log")
    sent.set_ylabel("MB that left a node, mean")
    sent.tick_params(axis="x", rotation=20)
    tidy(figure).savefig(path, dpi=120)
    plt.close(figure)
