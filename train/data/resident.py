"""Batches of images, or of sentences, that stay on the devices."""

import functools
from collections.abc import Generator
from typing import Any

import numpy as np
from jax import Array

import lsgd_jax as lj
from train.data.arrays import Dataset
from train.data.sampler import EpochSampler, test_rows
from train.data.translation import Translation


class Resident:
    """A source that keeps all examples on the devices. A batch holds row numbers.

    Examples are images and their labels, or sentences and their translations.

    Args:
      dataset: the examples.
      sampler: chooses the examples that each worker sees at each step.
      workers: the grid.
      parts: the rows of each worker's own training images, int [W, size]; None: all rows.
      test_batch: maximum number of test examples per worker and batch.

    Attributes:
      data: the training examples on the devices: each worker's own part, or all of them in
        a `Shared`.
      test_batches: all test examples: (images, labels, whether one counts) [W, b, ...].
      steps_per_epoch: number of steps in which a worker sees its examples once.
      most_in_flight: number of steps that may be in flight. They need little memory, but a
        request to stop the run waits for them.
    """

    most_in_flight = 4

    def __init__(
        self,
        dataset: Dataset | Translation,
        sampler: EpochSampler,
        workers: lj.Workers,
        parts: np.ndarray | None,
        test_batch: int,
    ):
        self._sampler = sampler
        self._workers = workers
        self.steps_per_epoch = sampler.steps_per_epoch
        train = tuple(dataset.train)
        if parts is None:
            self.data = workers.share(train)
        else:
            mine = parts[list(workers.owned)]
            self.data = workers.put_owned(tuple(x[mine] for x in train))
        self._test = tuple(dataset.test)
        self._test_batch = test_batch

    @functools.cached_property
    def test_batches(self) -> list[Any]:
        """Placed on first use, because not all processes test."""
        test = self._test
        count = len(self._test[0])
        placed = []
        for mine in test_rows(count, self._workers, self._test_batch):
            taken = np.minimum(mine, count - 1)
            batch = *(x[taken] for x in test), mine < count
            placed.append(self._workers.put_owned(batch))
        return placed

    def batches(self, steps: range) -> Generator[Array, None, None]:
        """Yields the batch of each step (from 0): the rows of each worker, int32 [W, B]."""
        for step in steps:
            rows = self._sampler.rows(step, self._workers.owned)
            yield self._workers.put_owned(rows)

    @staticmethod
    def examples(data: Any, batch: Array) -> tuple[Array, Array]:
        """One worker's images and labels: (data, rows) -> ([B, ...], [B, ...])."""
        inputs, targets = data.value if isinstance(data, lj.Shared) else data
        return inputs[batch], targets[batch]
