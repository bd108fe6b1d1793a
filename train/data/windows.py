"""Windows of a text that lies on the devices: of random ones each worker learns."""

import functools
from collections.abc import Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import lsgd_jax as lj
from train.data.arrays import DataError
from train.data.sampler import rows_in_batches
from train.data.text import Text


TEST_TOKENS = 2**14  # per worker and batch


class Windows:
    """All of the text lies on the devices; workers draw from it inside their steps.

    Args:
      text: the token ids.
      context: T, how many tokens are seen at once.
      batch_size: B, windows per worker and step.
      workers: the grid.
      shard: give each worker a part of the training text of its own.

    Attributes:
      size: tokens of each worker's training text.
      data: the training text on the devices: of each worker its own part, or in a `Shared`
        all of it.
      test_batches: (windows [W, b, T + 1], whether a prediction counts [W, b, T]): every
        token of the validation text but the first is predicted once.
      most_in_flight: steps that may wait for a device.

    Raises:
      DataError: a text that is too short, or of one and the same token.
    """

    most_in_flight = 4

    def __init__(
        self, text: Text, context: int, batch_size: int, workers: lj.Workers, shard: bool
    ):
        self._context, self._batch_size, self._workers = context, batch_size, workers
        self.size = size = len(text.train) // (workers.num_workers if shard else 1)
        _check(text, size, context, shard)
        if shard:
            parts = text.train[: size * workers.num_workers].reshape(-1, size)
            self.data = workers.put_owned(parts[list(workers.owned)])
        else:
            self.data = workers.share(text.train)
        self._test = text.test

    @functools.cached_property
    def test_batches(self) -> list[Any]:
        """Placed when they are first asked for: not all processes test."""
        return list(self._in_batches(self._test))

    def _in_batches(self, ids: np.ndarray) -> Iterator[Any]:
        """Windows one after the other, each from the last token of the one before."""
        length, predicted = self._context, len(ids) - 1
        starts = np.arange(0, predicted, length)
        places = starts[:, None] + np.arange(length + 1)
        windows, counts = ids[np.minimum(places, predicted)], places[:, 1:] <= predicted
        most = max(1, TEST_TOKENS // length)
        workers, count = self._workers, len(starts)
        for rows in rows_in_batches(count, workers.num_workers, most):
            mine = rows[list(workers.owned)]
            taken = np.minimum(mine, count - 1)
            valid = counts[taken] & (mine < count)[..., None]
            yield workers.put_owned((windows[taken], valid))

    @staticmethod
    def batches(steps: range) -> Generator[tuple[()], None, None]:
        """Nothing for each step: workers draw their windows themselves."""
        for _ in steps:
            yield ()

    def draw(self, data: Any, key: Array) -> Array:
        """One worker's random windows: (its data, key) -> int32 [B, T + 1]."""
        ids = data.value if isinstance(data, lj.Shared) else data
        last = len(ids) - self._context - 1
        starts = jax.random.randint(key, (self._batch_size,), 0, last + 1)
        places = starts[:, None] + jnp.arange(self._context + 1)[None]
        return ids[places].astype(jnp.int32)


def _check(text: Text, size: int, context: int, shard: bool) -> None:
    whose = "each worker's part of the training text" if shard else "the training text"
    needed = context + 1
    if size < needed:
        raise DataError(
            f"{whose}, the first nine tenths, must have at least {needed:,} tokens (one "
            f"more than data.context), got {size:,}"
        )
    if len(text.test) < 2:
        raise DataError("the validation text, the last tenth, must have at least 2 tokens")
    if len(text.train) >= 2**31:
        raise DataError(f"the text must have less than 2**31 tokens, got {len(text.train)}")
    if len(text.vocabulary) < 2:
        raise DataError("the text must have at least 2 different characters, got 1")
