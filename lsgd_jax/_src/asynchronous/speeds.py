"""How long the workers' steps take in a simulation: the same for the same seed."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from lsgd_jax._src.checks import check_fraction


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The distribution of a step's seconds: step · factor · noise, now and then a stall.

    Each worker draws from a generator of its own, so that one worker's times do not depend
    on what the others do.

    Args:
      step: mean seconds of a step without stalls.
      slow: factors by which some workers are slower, such as {0: 3.0}.
      jitter: in [0, 1]: noise that is uniform in 1 ± jitter.
      lognormal: σ of noise that is log-normal with mean 1; both kinds multiply.
      stall_probability: of a step to stall.
      stall: seconds that a stall adds.

    Raises:
      ValueError: times or factors that are not positive, a probability outside [0, 1].

    >>> step_seconds = Speeds(step=0.1, slow={0: 3.0}).of(worker=0, seed=0)
    >>> round(step_seconds(), 3)
    0.3
    """

    step: float = 0.01
    slow: Mapping[int, float] = dataclasses.field(default_factory=dict)
    jitter: float = 0.0
    lognormal: float = 0.0
    stall_probability: float = 0.0
    stall: float = 0.0

    def __post_init__(self):
        factors = {f"slow[{i}]": factor for i, factor in self.slow.items()}
        for name, value in {"step": self.step, **factors}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be positive, got {name}={value}")
        for name in ("lognormal", "stall"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be at least 0, got {name}={value}")
        check_fraction("jitter", self.jitter)
        check_fraction("stall_probability", self.stall_probability)

    def of(self, worker: int, seed: int) -> "StepSeconds":
        """A function that draws one worker's times."""
        return StepSeconds(self, worker, seed)


class StepSeconds:
    """One worker's times, one after the other."""

    def __init__(self, speeds: Speeds, worker: int, seed: int):
        self._speeds, self._random = speeds, np.random.default_rng([seed, worker])
        self._mean = speeds.step * speeds.slow.get(worker, 1.0)

    def __call__(self) -> float:
        speeds, seconds = self._speeds, self._mean
        if speeds.jitter:
            seconds *= 1 + speeds.jitter * self._random.uniform(-1, 1)
        if sigma := speeds.lognormal:
            seconds *= math.exp(sigma * self._random.standard_normal() - sigma**2 / 2)
        if speeds.stall_probability and self._random.random() < speeds.stall_probability:
            seconds += speeds.stall
        return seconds
