"""The interface of a task: its data, its loss and its test."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import flax.linen as nn
from jax import Array


TestResult = dict[str, float]  # see train.metrics.measures
Check = Callable[[], None]  # raises an exception if a test is to be left


def go_on() -> None:
    """The check of a test that nothing stops."""


class Forward(Protocol):
    """Applies one worker's network to a batch, for training and for testing.

    Attributes:
      model: the network.
      source: the source of batches: a `Resident`, a `Stream` or `Windows`.
      sizes: sizes of the data by name, such as the number of training images.
      guess: the first measure of a test's result for a model that guesses uniformly.
      kept: contents of the files in the run folder that describe the data, by name. A run
        resumes only with the same contents.
      held_out: training examples whose loss elects leaders, as one worker's test batch in
        host memory; None if there are none.
    """

    model: nn.Module
    source: Any
    sizes: dict[str, int]
    guess: float
    kept: dict[str, str]
    held_out: Any

    def init(self, key: Array) -> dict[str, Any]:
        """The initial variables: 'params', and possibly batch statistics."""
        ...

    def loss(
        self, params: Any, stats: Any, data: Any, batch: Any, key: Array
    ) -> tuple[Array, Any]:
        """The mean loss of one worker's training batch in nats, and updated statistics."""
        ...

    def sums(self, variables: Any, *batch: Array) -> Sequence[Array]:
        """Sums over one worker's test batch."""
        ...

    def mean_loss(self, sums: Any) -> Any:
        """The mean loss in nats, from sums over test batches."""
        ...

    def result(self, totals: Any) -> TestResult:
        """The result of a test from the sums over all test batches and workers."""
        ...

    def score(self, variables: Any, check: Check = go_on) -> TestResult:
        """Further measures of a model, for the end of a run. `check` is called often."""
        return {}

    def sample(self, variables: Any, key: Array) -> str:
        """A text that the model generates, or '' if it does not generate text."""
        return ""
