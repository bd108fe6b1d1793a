"""Who leads: the worker with the lowest finite score, ties to the lowest index."""

import collections
import math
from collections.abc import Mapping


def lowest(scores: Mapping[int, float]) -> int | None:
    """The index with the lowest score; None if no score is finite.

    >>> lowest({2: 1.5, 0: float("nan"), 1: 1.5})
    1
    """
    finite = [(score, i) for i, score in scores.items() if math.isfinite(score)]
    return min(finite)[1] if finite else None


class Score:
    """The mean of the last losses: of those that there are, never of what was not measured.

    Not finite as long as one of them is not.

    >>> score = Score(window=2)
    >>> [score.add(loss) for loss in (4.0, 2.0, 1.0)]
    [4.0, 3.0, 1.5]
    """

    def __init__(self, window: int):
        self.losses: collections.deque[float] = collections.deque(maxlen=window)

    def add(self, loss: float) -> float:
        """The score with one more loss."""
        self.losses.append(loss)
        return self.value

    @property
    def value(self) -> float:
        """The score; inf before the first loss."""
        mean = sum(self.losses) / len(self.losses) if self.losses else math.inf
        return mean if math.isfinite(mean) else math.inf
