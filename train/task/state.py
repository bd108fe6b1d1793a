"""The training state: all that training changes."""

from typing import Any, NamedTuple

from jax import Array

import lsgd_jax as lj


class TrainState(NamedTuple):
    """The training state of workers in lock step; one worker's step sees its own rows.

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


class EngineState(NamedTuple):
    """The state of the engine that asynchronous workers run on; leaves [W, ...].

    Attributes:
      method: the leaves of the method's state.
      count: int32, steps that each worker has taken.
      number: int32, rounds that it has seen.
      sent: float32, bytes that it has sent.
    """

    method: list[Any]
    count: Any
    number: Any
    sent: Any


class AsynchronousState(NamedTuple):
    """The training state of asynchronous workers: a `TrainState` and the engine's.

    `opt_state` is that of the base optimizer, `step` the mean over the workers.
    """

    params: Any
    stats: Any
    opt_state: Any
    key: Array
    step: lj.Shared[Array]
    engine: EngineState
