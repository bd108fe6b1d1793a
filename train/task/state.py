"""The training state: everything that training changes."""

from typing import Any, NamedTuple

from jax import Array

import lsgd_jax as lj


class TrainState(NamedTuple):
    """The training state of workers in lock step. A worker's step sees its own row.

    Attributes:
      params: parameters, [W, ...].
      stats: batch statistics and other variables of the model, [W, ...].
      opt_state: state of the optimizers.
      key: random key of each worker, [W]. It never changes; steps are folded in.
      step: number of steps taken, int32 scalar, shared.
    """

    params: Any
    stats: Any
    opt_state: Any
    key: Array
    step: lj.Shared[Array]


class EngineState(NamedTuple):
    """The state of the engine of asynchronous workers, with leaves [W, ...].

    Attributes:
      method: leaves of the method's state.
      count: steps that each worker has taken, int32.
      number: rounds that each worker has seen, int32.
      sent: bytes that each worker has sent, float32.
    """

    method: list[Any]
    count: Any
    number: Any
    sent: Any


class AsynchronousState(NamedTuple):
    """The training state of asynchronous workers: a `TrainState` and an `EngineState`.

    `opt_state` is the state of the base optimizer, `step` the mean over the workers.
    """

    params: Any
    stats: Any
    opt_state: Any
    key: Array
    step: lj.Shared[Array]
    engine: EngineState
