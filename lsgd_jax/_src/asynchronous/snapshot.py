"""A worker as others see it."""

from typing import NamedTuple

import numpy as np


class Snapshot(NamedTuple):
    """A worker as others see it.

    Attributes:
      vector: its parameters, float32 [n].
      step: how many steps it had taken.
      measure: what decides how much is taken from it (dpwa: its clock or its loss).
      loss: its score, the mean of its last losses.
    """

    vector: np.ndarray
    step: int
    measure: float
    loss: float
