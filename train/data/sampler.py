"""The choice of the training examples that each worker sees at each step."""

import functools
from typing import Any

import numpy as np


class EpochSampler:
    """Each worker goes through its examples in a random order, a new one in each epoch.

    The rows of a step depend only on (seed, worker, step), so that resuming needs no other
    state than the step count.

    Args:
      size: number of examples per worker.
      batch_size: examples per worker and step. An epoch leaves out the examples at its end
        that do not fill a batch.
      seed: seed of the orders.

    Raises:
      ValueError: the examples do not fill one batch.

    >>> sampler = EpochSampler(size=5, batch_size=2, seed=0)
    >>> sampler.rows(step=0, workers=range(3)).shape
    (3, 2)
    """

    def __init__(self, size: int, batch_size: int, seed: int):
        if batch_size > size:
            raise ValueError(
                f"`batch_size` must be at most {size}, the number of training examples per "
                f"worker, got batch_size={batch_size}; use a smaller batch, fewer "
                "workers, or --data.no-shard"
            )
        self.batch_size = batch_size
        self.steps_per_epoch = size // batch_size

        @functools.lru_cache(maxsize=2)  # reading ahead alternates between two epochs
        def orders(epoch: int, workers: range) -> np.ndarray:

            random = [np.random.default_rng([seed, worker, epoch]) for worker in workers]
            return np.stack([each.permutation(size) for each in random]).astype(np.int32)

        self._orders = orders

    def rows(self, step: int, workers: range) -> np.ndarray:
        """Each worker's rows for a step (from 0): int32 [len(workers), B]."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        start = batch * self.batch_size
        return self._orders(epoch, workers)[:, start : start + self.batch_size]


def parts(count: int, workers: int, seed: int) -> np.ndarray:
    """Random parts of `count` examples of equal size, one per worker: int [W, count // W].

    >>> parts(7, workers=2, seed=0).shape
    (2, 3)
    """
    order = np.random.default_rng(seed).permutation(count)
    size = count // workers
    return order[: workers * size].reshape(workers, size)


def sampled(
    count: int, workers: int, batch_size: int, seed: int, shard: bool
) -> tuple[EpochSampler, np.ndarray | None]:
    """The sampler of `count` examples, and the rows of each worker's own part.

    shard: whether each worker has a part of its own. Otherwise the rows are None.
    """
    own = parts(count, workers, seed) if shard else None
    size = count if own is None else own.shape[1]
    return EpochSampler(size, batch_size, seed), own


def test_rows(count: int, place: Any, most: int) -> np.ndarray:
    """The rows of the test examples that this process takes, in batches: int [n, W', b].

    Args:
      count: the number of test examples.
      place: all workers, or those of a process, which then tests all examples itself.
      most: the size of a worker's batch at most.
    """
    testers = getattr(place, "testers", place)
    return rows_in_batches(count, testers.num_workers, most)[:, list(testers.owned)]


def rows_in_batches(count: int, workers: int, most: int) -> np.ndarray:
    """The rows 0 to count - 1 in batches of at most `most` per worker: int [n, W, b].

    Rows from `count` on fill up the last batch.

    >>> rows_in_batches(5, workers=2, most=2).tolist()
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    """
    batch = min(most, -(-count // workers))
    batches = -(-count // (workers * batch))
    return np.arange(batches * workers * batch).reshape(batches, workers, batch)
