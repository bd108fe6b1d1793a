"""Durations of the workers' steps in a simulation, the same for the same seed."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from lsgd_jax._src.checks import check_fraction


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The duration of a step: mean · factor · noise, and an occasional stall.

    Each worker draws from its own generator, so that its durations do not depend on the
    other workers.

    Args:
      step: mean seconds of a step without stalls.
      slow: factors by which some workers are slower, such as {0: 3.0}.
      jitter: half-width in [0, 1] of uniform noise around 1.
      lognormal: σ of log-normal noise with mean 1; both kinds of noise multiply.
      stall_probability: probability that a step stalls.
      stall: seconds that a stall adds.

    Raises:
      ValueError: times or factors that are not positive, a probability outside [0, 1].

    >>> step_seconds = Speeds(step=0.1, slow={0: 3.0}).of(worker=0, seed=0)
    >>> round(step_seconds(), 3)
    0.3
    >>> noisy_seconds = Speeds(step=1.0, lognormal=0.5).of(worker=0, seed=0)
    >>> drawn = np.array([noisy_seconds() for _ in range(20_000)])
    >>> round(float(drawn.mean()), 2), round(float(np.log(drawn).std()), 2)
    (1.0, 0.5)
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

    def of(self, worker: int, seed: int) -> Callable[[], float]:
        """Returns a function that draws the durations of one worker's steps."""
        random = np.random.default_rng([seed, worker])
        mean = self.step * self.slow.get(worker, 1.0)
        sigma = self.lognormal

        def draw() -> float:
            seconds = mean
            if self.jitter:
                seconds *= 1 + self.jitter * random.uniform(-1, 1)
            if sigma:
                seconds *= math.exp(sigma * random.standard_normal() - sigma**2 / 2)
            if self.stall_probability and random.random() < self.stall_probability:
                seconds += self.stall
            return seconds

        return draw
