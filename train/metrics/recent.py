"""How each worker has done lately, by which the best one is known."""

from collections.abc import Iterable

import numpy as np


SPAN = 16  # steps that the average is about


class RecentLosses:
    """The average loss of each worker over its last steps, the latest counting most.

    It depends on the losses alone and not on when they are read, so that a run that is
    resumed knows the same best worker as one that was not interrupted.

    Args:
      average, nonfinite_steps: as the attributes.

    Attributes:
      average: float64 [W]; inf for a worker whose last loss was not finite.
      nonfinite_steps: for how many steps in a row no worker has had a finite loss.
    """

    def __init__(self, average: np.ndarray, nonfinite_steps: int = 0):
        self.average = np.asarray(average, np.float64)
        self.nonfinite_steps = nonfinite_steps

    @classmethod
    def unknown(cls, workers: int) -> "RecentLosses":
        """Before the first step of so many workers."""
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
        """Takes in the losses [W] of the next steps."""
        for loss in losses:
            loss = np.asarray(loss, np.float64)
            finite, known = np.isfinite(loss), np.isfinite(self.average)
            before = np.where(known, self.average, loss)
            with np.errstate(invalid="ignore"):
                average = before + (loss - before) / SPAN
            self.average = np.where(finite, average, np.inf)
            self.nonfinite_steps = 0 if finite.any() else self.nonfinite_steps + 1
