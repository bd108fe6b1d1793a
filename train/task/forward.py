"""The network of a task on a batch: its data, its loss, its test."""

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import flax.linen as nn
from jax import Array


TestResult = dict[str, float]  # the values of a test, see train.metrics.measures


class Source(Protocol):
    """The source of batches: `Resident`, `Stream` or `Windows`.

    Attributes:
      data: the data that stay on the devices.
      test_batches: the arguments of `Forward.sums` after the first, of all workers.
      most_in_flight: steps that may wait for a device.
    """

    data: Any
    most_in_flight: int

    @property
    def test_batches(self) -> Any: ...

    def batches(self, steps: range) -> Generator[Any, None, None]:
        """The batches of all workers for each of the steps (from 0)."""
        ...


class Forward(Protocol):
    """One worker's network applied to a batch, for training and for testing.

    Attributes:
      model: the network.
      source: the source of batches.
      sizes: the numbers of examples and the like, by name.
      steps_per_epoch: in so many a worker sees about as much as it has.
      kept: the files of the run folder that describe the data, by name; a run goes on with
        the same only.
    """

    model: nn.Module
    source: Any
    sizes: dict[str, int]
    steps_per_epoch: int
    kept: dict[str, str]

    def init(self, key: Array) -> dict[str, Any]:
        """The variables at the start: 'params', and batch statistics if there are any."""
        ...

    def loss(
        self, params: Any, stats: Any, data: Any, batch: Any, key: Array
    ) -> tuple[Array, Any]:
        """The mean loss of one worker's training batch, in nats; renewed statistics."""
        ...

    def sums(self, variables: Any, *batch: Array) -> Sequence[Array]:
        """Sums over one worker's test batch."""
        ...

    def result(self, totals: Any) -> TestResult:
        """The result of a test, from the sums over all test batches and workers."""
        ...

    def sample(self, variables: Any, key: Array) -> str:
        """A text that the model writes after training; empty if it does not write."""
        return ""
