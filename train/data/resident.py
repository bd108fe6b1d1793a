"""Images that lie on the devices."""

import functools
from collections.abc import Generator
from typing import Any

import numpy as np
from jax import Array

import lsgd_jax as lj
from train.data.arrays import Dataset
from train.data.sampler import EpochSampler, rows_in_batches


class Resident:
    """All images lie on the devices; a batch says which of them each worker takes.

    Args:
      dataset: the images.
      sampler: which images each worker sees at which step.
      workers: the grid.
      parts: of the training images each worker's own, int [W, size]; None: all.
      test_batch: test images per worker and batch, at most.

    Attributes:
      data: the training images and labels on the devices: of each worker its own part, or
        in a `Shared` all of them.
      test_batches: (images, labels, whether it counts) [W, b, ...], of all test images.
      most_in_flight: steps that may wait for a device. They hold nothing large, but a
        request to stop the run waits for them.
    """

    most_in_flight = 4

    def __init__(
        self,
        dataset: Dataset,
        sampler: EpochSampler,
        workers: lj.Workers,
        parts: np.ndarray | None,
        test_batch: int,
    ):
        self._sampler, self._workers = sampler, workers
        train = dataset.train.images, dataset.train.labels
        if parts is None:
            self.data = workers.share(train)
        else:
            mine = parts[list(workers.owned)]
            self.data = workers.put_owned((train[0][mine], train[1][mine]))
        self._test, self._test_batch = dataset.test, test_batch

    @functools.cached_property
    def test_batches(self) -> list[Any]:
        """Placed when they are first asked for: not all processes test."""
        test, workers, count = self._test, self._workers, len(self._test.labels)
        placed = []
        for rows in rows_in_batches(count, workers.num_workers, self._test_batch):
            mine = rows[list(workers.owned)]
            taken = np.minimum(mine, count - 1)
            batch = test.images[taken], test.labels[taken], mine < count
            placed.append(workers.put_owned(batch))
        return placed

    def batches(self, steps: range) -> Generator[Array, None, None]:
        """The batch of each step (from 0): which images each worker takes, int32 [W, B]."""
        for step in steps:
            rows = self._sampler.rows(step, self._workers.owned)
            yield self._workers.put_owned(rows)

    @staticmethod
    def images_and_labels(data: Any, batch: Array) -> tuple[Array, Array]:
        """One worker's images and labels: (its data, rows) -> ([B, ...], [B])."""
        images, labels = data.value if isinstance(data, lj.Shared) else data
        return images[batch], labels[batch]
