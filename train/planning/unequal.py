"""How workers differ: speeds and faults, as options of a simulation and of a plan."""

import dataclasses
from collections.abc import Mapping

import lsgd_jax as lj


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unequal:
    """The speeds and the faults of workers.

    Args:
      slow: WORKER FACTOR, slower workers.
      jitter: uniform noise of the step time, in [0, 1].
      lognormal: sigma of log-normal noise of the step time.
      stall: PROBABILITY MILLISECONDS, steps that take longer.
      drop: WORKER SECONDS, workers that fail.
      join: WORKER SECONDS, workers that join, or come back.
      timeout: seconds to wait for a worker.
    """

    slow: Mapping[int, float] = dataclasses.field(default_factory=dict)
    jitter: float = 0.0
    lognormal: float = 0.0
    stall: tuple[float, float] = (0.0, 0.0)
    drop: Mapping[int, float] = dataclasses.field(default_factory=dict)
    join: Mapping[int, float] = dataclasses.field(default_factory=dict)
    timeout: float = 60.0

    @property
    def differs(self) -> bool:
        """Whether workers have unequal speeds or faults."""
        noise = self.jitter, self.lognormal, self.stall[0]
        return any(noise) or any((self.slow, self.drop, self.join))

    def speeds(self, step: float) -> lj.asynchronous.Speeds:
        """The speeds, for steps of so many seconds on average.

        Raises:
          ValueError: a number is out of range.
        """
        probability, milliseconds = self.stall
        return lj.asynchronous.Speeds(
            step,
            self.slow,
            jitter=self.jitter,
            lognormal=self.lognormal,
            stall_probability=probability,
            stall=milliseconds / 1e3,
        )

    def check_workers(self, workers: int) -> None:
        """Raises ValueError unless the values are valid for this number of workers."""
        self.speeds(1.0)
        for name in ("slow", "drop", "join"):
            for worker, value in getattr(self, name).items():
                if worker not in range(workers) or value < 0:
                    raise ValueError(
                        f"`{name}` must be workers from 0 to {workers - 1} with "
                        f"nonnegative numbers, got {name}={worker} {value}"
                    )
        if not self.timeout > 0:
            raise ValueError(f"`timeout` must be positive, got timeout={self.timeout}")
