"""The training of one worker, and of a grid of workers in lock step; the tests of both."""

import abc
import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import lsgd_jax as lj
from train.cluster.session import Session
from train.config import Config
from train.data.arrays import DataError
from train.data.in_flight import Backlog
from train.data.text import Text
from train.data.text import load as load_text
from train.task import batch_statistics, inside, optimizers, schedules
from train.task.datasets import Data, load_dataset
from train.task.forward import Forward, TestResult
from train.task.images import ImageForward
from train.task.models import MODELS
from train.task.state import TrainState
from train.task.text import TextForward


REESTIMATE_BATCHES = 8  # per worker


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """The base optimizer of a configuration with the method around it."""
    rate = schedules.learning_rate(config.optimizer, config.steps)
    return config.method.around(optimizers.make(config.optimizer, rate), rate)


def load(config: Config) -> Data | Text:
    """The data that a configuration names; raises as `Task` does."""
    if config.data.name == "text":
        return load_text(config.data.files, config.data.tokens)
    return load_dataset(config)


class Task:
    """The training of one worker: its network, its data, its start and its step.

    Args:
      config: the experiment's.
      dataset: data (and transforms) to take instead of those that the configuration names.
      place: puts data on the devices of the workers: a `lj.Workers`, or a
        `train.task.asynchronous.Place` for a worker that has no grid.
      warn: called with a line about a flaw of the data that is no error.
      session: the processes of the run.

    Attributes:
      forward: the network on a batch.
      tx: the optimizer; the method is part of it in lock step.

    Raises:
      ValueError: settings that contradict each other; DataError: data files that are
        missing or wrong.
    """

    def __init__(
        self,
        config: Config,
        dataset: Data | Text | None,
        place: Any,
        warn: Callable[[str], None],
        session: Session,
    ):
        self._config = config
        self.tx = make_optimizer(config)
        data = load(config) if dataset is None else dataset
        if isinstance(data, Text):
            if not session.same_everywhere(data.sha256):
                raise DataError("the processes read different texts; give all the same")
            self.forward: Forward = TextForward(config, data, place)
        else:
            model = MODELS[config.model](num_classes=data[0].num_classes)
            self.forward = ImageForward(config, model, data, place, warn, session)

    def first_variables(self) -> dict[str, Any]:
        """The start of all workers: 'params', and batch statistics if there are any."""

        def init() -> dict[str, Any]:
            key, _ = jax.random.split(jax.random.key(self._config.seed))
            return self.forward.init(key)

        # It runs once. On CPUs this compiles it in a quarter of the time.
        on_cpu = jax.default_backend() == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else {}
        return jax.jit(init, compiler_options=options)()

    def keys(self) -> Array:
        """A random key for each worker of the configuration, [W]."""
        grid = self._config.workers
        _, key = jax.random.split(jax.random.key(self._config.seed))
        return jax.random.split(key, grid.nodes * grid.locals)

    def learn(
        self, state: TrainState, data: Any, batch: Any
    ) -> tuple[Any, Any, Any, Array]:
        """One worker's step, not applied: (updates, opt_state, stats, loss)."""
        key = jax.random.fold_in(state.key, state.step.value)

        def loss_of(params):
            return self.forward.loss(params, state.stats, data, batch, key)

        gradient = lj.unrolled(jax.value_and_grad(loss_of, has_aux=True))
        (loss, stats), grads = gradient(state.params)
        updates, opt_state = self.tx.update(
            grads, state.opt_state, state.params, value=loss, grad=grads
        )
        return updates, opt_state, stats, loss

    def step(self, state: TrainState, data: Any, batch: Any) -> tuple[TrainState, Array]:
        """One worker's step in lock step: (state, loss)."""
        updates, opt_state, stats, loss = self.learn(state, data, batch)
        params = lj.apply_updates(state.params, updates)
        if self._config.batch_statistics == "average":
            stats = batch_statistics.averaged(stats, state.opt_state, opt_state)
        step = lj.Shared(state.step.value + 1)
        return TrainState(params, stats, opt_state, state.key, step), loss


class BaseExperiment(abc.ABC):
    """A configuration, built for a grid of workers: all its errors are found here.

    The training state is that of all workers, stacked. Tests read it and change nothing.

    Args:
      config: the configuration.
      dataset, warn: see `Task`.
      devices: the devices to use, all of them. Defaults to the choice of `lj.Workers`.
      session: the processes of the run. Defaults to this one by itself.

    Attributes:
      workers: the grid.
      task: the training of one worker.
      forward: the network on a batch.
      data: the data that stay on the devices: each worker's own training data, or in a
        `Shared` all of them, or nothing if batches bring them along.

    Raises:
      ValueError, DataError: as `Task` does.
    """

    def __init__(
        self,
        config: Config,
        dataset: Data | Text | None = None,
        warn: Callable[[str], None] = warnings.warn,
        devices: Sequence[jax.Device] | None = None,
        session: Session | None = None,
    ):
        self._config = config
        grid, session = config.workers, session or Session()
        self.workers = lj.Workers(
            grid.nodes, grid.locals, devices=devices, inside=grid.axes
        )
        session.connect(self.workers.mesh)
        self.task = Task(config, dataset, self.workers, warn, session)
        self.forward = self.task.forward
        self.data = self.forward.source.data
        self._pick = self.workers.map(_of_worker)
        self._sums = self.workers.map(self._sums_of_one)
        self._stats_of_batch = self.workers.map(self._stats_of_one)

    @abc.abstractmethod
    def init(self) -> Any:
        """The state before the first step: all workers start from the same parameters."""

    @abc.abstractmethod
    def bytes_sent(self, state: Any) -> int:
        """Bytes that each worker has sent, the mean if they differ."""

    # Data

    def batches(self, steps: range) -> Generator[Any, None, None]:
        """The batches of all workers for each of the steps (from 0), on the devices."""
        return self.forward.source.batches(steps)

    def batch(self, step: int) -> Any:
        """The batches of all workers for one step (from 0), on the devices."""
        with contextlib.closing(self.batches(range(step, step + 1))) as batches:
            return next(batches)

    def backlog(self) -> Backlog:
        """For steps in flight: as many as the memory for their batches allows."""
        return Backlog(self.forward.source.most_in_flight)

    # Testing

    def test_center(self, state: Any) -> TestResult:
        """The test of the model that the workers stand for together."""
        return self._test(*self._center(state))

    def test_worker(self, state: Any, worker: int) -> TestResult:
        """The test of one worker's own model."""
        variables = state.params, state.stats
        return self._test(*self._pick(variables, lj.Shared(worker)).value)

    def sample(self, state: Any) -> str:
        """A text that the center writes; empty if models of this kind do not write."""
        # On the host, so that each process draws by itself.
        params, stats = self.workers.fetch(self._center(state))
        key = jax.random.key(self._config.seed)
        return self.forward.sample({"params": params, **stats}, key)

    def _center(self, state: Any) -> tuple[Any, Any]:
        """The parameters and the batch statistics of the center."""
        center = lj.center(state.params, state.opt_state)
        return center, lj.consensus(state.stats) if state.stats else {}

    def _test(self, params: Any, stats: Any) -> TestResult:
        if stats and self._config.batch_statistics == "reestimate":
            stats = self.reestimated(params, stats)
        variables, add = lj.Shared({"params": params, **stats}), self.backlog().add
        batches = self.forward.source.test_batches
        sums = [add(self._sums(variables, *batch)) for batch in batches]
        totals = np.sum(self.workers.fetch(sums), axis=(0, 2), dtype=np.float64)
        return self.forward.result(totals)

    def _sums_of_one(self, variables, *batch):
        return self.forward.sums(variables.value, *batch)

    def reestimated(self, params: Any, stats: Any) -> Any:
        """The mean statistics of some batches of every worker, with these parameters.

        Args:
          params: those of one model.
          stats: statistics of the right shapes.
        """
        count = min(REESTIMATE_BATCHES, self.forward.steps_per_epoch)
        keys = self.workers.put(self.task.keys())
        shared, add = lj.Shared((params, stats)), self.backlog().add
        seen = [
            lj.consensus(add(self._stats_of_batch(shared, self.data, batch, keys)))
            for batch in self.batches(range(count))
        ]
        return jax.tree.map(lambda *each: sum(each) / count, *seen)

    def _stats_of_one(self, variables, data, batch, key):
        params, stats = variables.value
        apply = lambda stats: self.forward.loss(params, stats, data, batch, key)
        return batch_statistics.of_batch(apply, stats)


def _of_worker(tree: Any, worker: lj.Shared) -> lj.Shared:
    """One worker's tree, for all workers."""
    return lj.Shared(lj.Group(("node", "local")).broadcast(tree, worker.value))


class Experiment(BaseExperiment):
    """An experiment whose workers train in lock step; the arguments as there."""

    def __str__(self) -> str:
        return str(self.workers)

    def init(self) -> TrainState:
        start = self.task.first_variables()
        specs = inside.specs(self.workers.inside)
        params = self.workers.replicate(start.pop("params"), specs)
        return TrainState(
            params=params,
            stats=self.workers.replicate(start),
            opt_state=self.workers.map(self.task.tx.init)(params),
            key=self.workers.put(self.task.keys()),
            step=self.workers.share(jnp.zeros([], jnp.int32)),
        )

    @functools.cached_property
    def step(self) -> Callable[[TrainState, Any, Any], tuple[TrainState, Array]]:
        """All workers' step: (state, data, batch) -> (state, loss [W])."""
        return self.workers.map(self.task.step, donate=0)

    def bytes_sent(self, state: TrainState) -> int:
        diagnostics = self.workers.fetch(lj.diagnostics(state.opt_state))
        return sum(pull.bytes_sent for pull in diagnostics)
