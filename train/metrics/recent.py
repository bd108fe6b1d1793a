"""Recent losses of each worker, which decide which one is the best."""

from collections.abc import Iterable

import numpy as np


SPAN = 16  # time constant of the average, in steps


class RecentLosses:
    """Exponential moving average of each worker's losses.

    It depends on the losses alone and not on when they are read. A resumed run therefore
    knows the same best worker as an uninterrupted one.

    Args:
      average, nonfinite_steps: see the attributes.

    Attributes:
      average: float64 [W]; inf for a worker whose last loss was not finite.
      nonfinite_steps: consecutive steps, up to the last one, without any finite loss.
    """

    def __init__(self, average: np.ndarray, nonfinite_steps: int = 0):
        self.average = np.asarray(average, np.float64)
        self.nonfinite_steps = nonfinite_steps

    @classmethod
    def unknown(cls, workers: int) -> "RecentLosses":
        """The state of `workers` workers before the first step."""
        return cls(np.full(workers, np.inf))

    @property
    def best(self) -> int:
        """The worker with the lowest average.

        >>> recent = RecentLosses.unknown(3)
        >>> recent.add([[0.3, 0.1, np.nan]])
        >>> recent.best, recent.average.tolist()
        (1, [0.3, 0.1, inf])
        """
        return int(np.argmin(self.average))

    def add(self, losses: Iterable[np.ndarray]) -> None:
        """Updates the averages by the losses [W] of the next steps."""
        for loss in losses:
            loss = np.asarray(loss, np.float64)
            finite = np.isfinite(loss)
            known = np.isfinite(self.average)
            before = np.where(known, self.average, loss)
            with np.errstate(invalid="ignore"):
                average = before + (loss - before) / SPAN
            self.average = np.where(finite, average, np.inf)
            self.nonfinite_steps = 0 if finite.any() else self.nonfinite_steps + 1
