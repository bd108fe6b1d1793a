"""What an experiment asks of a task: its data, its loss, its test."""

from collections.abc import Generator, Sequence
from typing import Any, Protocol

from jax import Array


TestResult = dict[str, float]  # what a test measured, see train.metrics.measures


class Source(Protocol):
    """Where batches come from: `Resident`, `Stream` or `Windows`.

    Attributes:
      data: what lies on the devices for good.
      test_batches: the arguments of `Forward.sums` after the first, of all workers.
      most_in_flight: steps that may wait for a device.
    """

    data: Any
    most_in_flight: int

    @property
    def test_batches(self) -> Any: ...

    def batches(self, steps: range) -> Generator[Any, None, None]:
        """What each worker learns from at each of the steps (from 0)."""
        ...


class Forward(Protocol):
    """One worker's network applied to a batch, for training and for testing.

    Attributes:
      source: where batches come from.
      sizes: the numbers of examples and the like, by name.
      steps_per_epoch: in so many a worker sees about as much as it has.
      kept: what the run folder keeps of the data, by file name; a run goes on with the
        same only.
    """

    @property
    def source(self) -> Source: ...

    @property
    def sizes(self) -> dict[str, int]: ...

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def kept(self) -> dict[str, str]: ...

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
        """What the sums over all test batches and workers say."""
        ...

    def sample(self, variables: Any, key: Array) -> str:
        """What the model writes after training; nothing if it does not write."""
        ...
