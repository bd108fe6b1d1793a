"""The bandwidth between sites that a share of computing needs, layer by layer.

The model is that of "Streaming DiLoCo" (arXiv:2501.18512, Section 3.1). A step computes
forward, backward with respect to activations and backward with respect to parameters in
each layer, all equally long. Gradients or pseudo-gradients of a layer are sent after its
backward passes, one layer after the other. The forward pass of this layer waits for them in
the next step, or `delay` steps later. There are two sites, and links have no latency.
"""

import math
from typing import NamedTuple

import numpy as np


GRID = np.logspace(-1, 3, 50)  # Gbit/s, the bandwidths of the papers' tables
PERIODS = 2  # of which the last one is counted


class Model(NamedTuple):
    """A model whose layers are alike.

    Attributes:
      parameters: number of parameters.
      layers: number of layers.
      step: seconds of computing in a step.
    """

    parameters: float
    layers: int
    step: float


class SendSchedule(NamedTuple):
    """The steps at which the fragments of a model are sent.

    Attributes:
      period: steps between two exchanges of a layer; data parallel has 1.
      fragments: groups of layers that are sent at different steps; layer l is in group l
        modulo `fragments`.
      delay: steps that an exchange may take beyond the next step's beginning.
      bits: of a parameter on the wire.
    """

    period: int
    fragments: int = 1
    delay: int = 0
    bits: float = 16.0

    def fragment(self, step: int) -> int | None:
        """The fragment that is sent at the end of a step, or None."""
        at = step % self.period
        fragment = -(-at * self.fragments // self.period)  # rounded up
        if fragment < self.fragments and fragment * self.period // self.fragments == at:
            return fragment
        return None


def utilization(model: Model, schedule: SendSchedule, gbit: float) -> float:
    """Returns the share of the time that is spent computing.

    >>> tiny = Model(parameters=1e9, layers=1, step=16.0)
    >>> utilization(tiny, SendSchedule(period=1), gbit=1.0)
    0.5
    """
    layers = model.layers
    step = model.step
    pass_ = step / (3 * layers - 1)  # the first layer needs no gradient of its inputs
    transfer = schedule.bits * model.parameters / layers / (gbit * 1e9)
    now = 0.0
    free = 0.0  # the time from which the link is free
    ends = []  # of the periods
    arrivals: dict[int, dict[int, float]] = {}  # by the step and the layer that wait
    for t in range(PERIODS * schedule.period):
        sent = schedule.fragment(t)
        awaited = arrivals.pop(t, {})
        if sent is None and not awaited:
            now += step
        else:
            coming = arrivals.setdefault(t + 1 + schedule.delay, {})
            for layer in range(layers):
                now = max(now, awaited.get(layer, 0.0)) + pass_
            for layer in reversed(range(layers)):
                now += pass_ * (2 if layer else 1)
                if sent is not None and layer % schedule.fragments == sent:
                    free = coming[layer] = max(free, now) + transfer
        if (t + 1) % schedule.period == 0:
            ends.append(now)
    return schedule.period * step / (ends[-1] - ends[-2])


def needed(model: Model, schedule: SendSchedule, share: float) -> float:
    """Returns the last bandwidth of the papers' grid, in Gbit/s, that is not enough.

    Their tables name this point of the grid, as far as their numbers tell, or 1000 if none
    is enough. One point further the share of the time spent computing is reached.
    """
    # Bisection, as utilization grows with bandwidth.
    low = 0
    high = len(GRID)
    while low < high:
        middle = (low + high) // 2
        if utilization(model, schedule, GRID[middle]) >= share:
            high = middle
        else:
            low = middle + 1
    return float(GRID[max(low - 1, 0)])


def points(ours: float, theirs: float) -> int:
    """The number of points of the grid between two bandwidths."""
    return round(math.log(ours / theirs) / math.log(GRID[1] / GRID[0]))
