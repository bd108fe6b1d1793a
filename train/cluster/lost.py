"""The loss of a process, or one that does not come, as an exception."""

import re
from collections.abc import Iterable

import jax


class Lost(RuntimeError):
    """Processes of the run are lost.

    Attributes:
      processes: which.
    """

    def __init__(self, processes: Iterable[int]):
        self.processes = sorted(processes)
        super().__init__(f"lost: process {', '.join(map(str, self.processes))}")


class Late(TimeoutError):
    """Processes of the run live, but do not come in time."""


class WorkersLost(RuntimeError):
    """Workers at their own pace cannot go on: all are lost, or one has raised an error."""


def may_mean_a_loss(error: BaseException) -> bool:
    """Whether an error may have come from a step that needed a lost process.

    XLA's errors begin with their status; some of them come as ValueError.

    >>> may_mean_a_loss(ValueError("UNKNOWN: Gloo AllGather failed: Connection closed"))
    True
    >>> may_mean_a_loss(ValueError("`steps` must be a positive int, got steps=0"))
    False
    """
    of_xla = isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error))
    return bool(of_xla) or isinstance(error, jax.errors.JaxRuntimeError | Lost)
