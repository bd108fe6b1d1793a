"""What training changes."""

from typing import Any, NamedTuple

from jax import Array

import lsgd_jax as lj


class TrainState(NamedTuple):
    """All that training changes.

    Attributes:
      params: the workers' parameters, [W, ...].
      stats: their batch statistics and whatever else the model keeps, [W, ...].
      opt_state: their optimizers' state.
      key: random key of each worker, [W]; never changes, the step is folded in.
      step: int32 scalar, steps taken; shared.
    """

    params: Any
    stats: Any
    opt_state: Any
    key: Array
    step: lj.Shared[Array]
