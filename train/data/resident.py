"""Batches of images that stay on the devices."""

import functools
from collections.abc import Generator
from typing import Any

import numpy as np
from jax import Array

import lsgd_jax as lj
from train.data.arrays import Dataset
from train.data.sampler import EpochSampler, rows_in_batches


class Resident:
    """A source that keeps all images on the devices. A batch holds row numbers.

    Args:
      dataset: the images.
      sampler: chooses the images that each worker sees at each step.
      workers: the grid.
      parts: the rows of each worker's own training images, int [W, size]; None: all rows.
      test_batch: maximum number of test images per worker and batch.

    Attributes:
      data: the training images and labels on the devices: each worker's own part, or all of
        them in a `Shared`.
      test_batches: all test images: (images, labels, whether an image counts) [W, b, ...].
      most_in_flight: number of steps that may be in flight. They need little memory, but a
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
        """Placed on first use, because not all processes test."""
        test, workers, count = self._test, self._workers, len(self._test.labels)
        placed = []
        for rows in rows_in_batches(count, workers.num_workers, self._test_batch):
            mine = rows[list(workers.owned)]
            taken = np.minimum(mine, count - 1)
            batch = test.images[taken], test.labels[taken], mine < count
            placed.append(workers.put_owned(batch))
        return placed

    def batches(self, steps: range) -> Generator[Array, None, None]:
        """Yields the batch of each step (from 0): the rows of each worker, int32 [W, B]."""
        for step in steps:
            rows = self._sampler.rows(step, self._workers.owned)
            yield self._workers.put_owned(rows)

    @staticmethod
    def images_and_labels(data: Any, batch: Array) -> tuple[Array, Array]:
        """One worker's images and labels: (data, rows) -> ([B, ...], [B])."""
        images, labels = data.value if isinstance(data, lj.Shared) else data
        return images[batch], labels[batch]
