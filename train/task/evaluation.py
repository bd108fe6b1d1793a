"""Testing: it reads the training state and changes nothing in it."""

from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax import Array

import lsgd_jax as lj
from train.data.in_flight import Backlog
from train.task import batch_statistics
from train.task.batch_statistics import Policy
from train.task.forward import Forward, TestResult
from train.task.state import TrainState


REESTIMATE_BATCHES = 8  # per worker


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
        self._pick = workers.map(_of_worker)
        self._sums = workers.map(self._sums_of_one)
        self._stats_of_batch = workers.map(self._stats_of_one)

    def center(self, state: TrainState) -> TestResult:
        """The test of the model that the workers stand for together."""
        return self._test(*self._center(state))

    def _center(self, state: TrainState) -> tuple[Any, Any]:
        """The parameters and the batch statistics of the center."""
        center = lj.center(state.params, state.opt_state)
        return center, lj.consensus(state.stats) if state.stats else {}

    def worker(self, state: TrainState, worker: int) -> TestResult:
        """The test of one worker's own model."""
        variables = state.params, state.stats
        return self._test(*self._pick(variables, lj.Shared(worker)).value)

    def sample(self, state: TrainState, key: Array) -> str:
        """What the center writes."""
        # On the host, so that each process draws by itself.
        params, stats = self._workers.fetch(self._center(state))
        return self._forward.sample({"params": params, **stats}, key)

    def _test(self, params: Any, stats: Any) -> TestResult:
        if stats and self._policy == "reestimate":
            stats = self.reestimated(params, stats)
        source, variables = self._forward.source, lj.Shared({"params": params, **stats})
        add = Backlog(source.most_in_flight).add
        sums = [add(self._sums(variables, *batch)) for batch in source.test_batches]
        totals = np.sum(self._workers.fetch(sums), axis=(0, 2), dtype=np.float64)
        return self._forward.result(totals)

    def _sums_of_one(self, variables, *batch):
        return self._forward.sums(variables.value, *batch)

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
        apply = lambda stats: self._forward.loss(params, stats, data, batch, key)
        return batch_statistics.of_batch(apply, stats)


def _of_worker(tree: Any, worker: lj.Shared) -> lj.Shared:
    """One worker's tree, for all workers."""
    return lj.Shared(lj.Group(("node", "local")).broadcast(tree, worker.value))
