"""Testing: it reads the training state and changes nothing in it."""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import lsgd_jax as lj
from train.data.arrays import DataError
from train.data.in_flight import Backlog
from train.task import batch_statistics
from train.task.batch_statistics import Policy
from train.task.forward import Forward, cross_entropy
from train.task.state import TrainState


TEST_BATCH = 256  # images per worker
REESTIMATE_BATCHES = 8  # per worker


class TestResult(NamedTuple):
    """error: share of wrong answers in %; loss: mean cross entropy in nats."""

    error: float
    loss: float


class Evaluation:
    """The tests of an experiment, by all workers together.

    Args:
      forward: the network on a batch.
      workers: the grid.
      policy: where the batch statistics of the tested model come from.
      batches: the training batches of some steps, on the devices.
      count: how many of them statistics are reestimated from.
      keys: a random key of each worker, [W].
    """

    def __init__(
        self,
        forward: Forward,
        workers: lj.Workers,
        policy: Policy,
        batches: Callable[[range], Generator[Any, None, None]],
        count: int,
        keys: Array,
    ):
        self._forward, self._workers, self._policy = forward, workers, policy
        self._batches, self._count, self._keys = batches, count, keys
        self._count_wrong = workers.map(self._count_wrong_of_one)
        self._stats_of_batch = workers.map(self._stats_of_one)
        self._pick = jax.jit(
            lambda tree, worker: jax.tree.map(lambda x: x[worker], tree),
            out_shardings=workers.replicated,
        )

    def center(self, state: TrainState) -> TestResult:
        """The test of the model that the workers stand for together."""
        center = lj.center(state.params, state.opt_state)
        return self._test(center, lj.consensus(state.stats) if state.stats else {})

    def worker(self, state: TrainState, worker: int) -> TestResult:
        """The test of one worker's own model."""
        return self._test(*self._pick((state.params, state.stats), worker))

    def _test(self, params: Any, stats: Any) -> TestResult:
        if stats and self._policy == "reestimate":
            stats = self.reestimated(params, stats)
        source, variables = self._forward.source, lj.Shared({"params": params, **stats})
        add = Backlog(source.most_in_flight).add
        totals = [
            add(self._count_wrong(variables, *batch)) for batch in source.test_batches
        ]
        wrong, loss, count = np.sum(self._workers.fetch(totals), axis=(0, 2))
        if not count:
            raise DataError("no image to test with can be read any more")
        return TestResult(error=float(100 * wrong / count), loss=float(loss / count))

    def _count_wrong_of_one(self, variables, images, labels, valid):
        logits = self._forward.test(variables.value, images)
        losses = cross_entropy(logits, labels)
        wrong = logits.argmax(axis=1) != labels
        return (wrong & valid).sum(), jnp.where(valid, losses, 0).sum(), valid.sum()

    def reestimated(self, params: Any, stats: Any) -> Any:
        """The mean statistics of some batches of every worker, with these parameters.

        Args:
          params: those of one model.
          stats: statistics of the right shapes.
        """
        source, keys = self._forward.source, self._workers.put(self._keys)
        shared, add = lj.Shared((params, stats)), Backlog(source.most_in_flight).add
        seen = [
            lj.consensus(add(self._stats_of_batch(shared, source.data, batch, keys)))
            for batch in self._batches(range(self._count))
        ]
        return jax.tree.map(lambda *each: sum(each) / self._count, *seen)

    def _stats_of_one(self, variables, data, batch, key):
        params, stats = variables.value
        x, _, key = self._forward.prepared(data, batch, key)
        apply = lambda stats: self._forward.train(params, stats, key, x)
        return batch_statistics.of_batch(apply, stats)
