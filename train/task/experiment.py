"""What a configuration stands for: the grid, the data, the step of one worker, the test."""

import contextlib
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import lsgd_jax as lj
from train.cluster.session import Session
from train.config import Config
from train.data.arrays import DataError
from train.data.in_flight import Backlog
from train.data.text import Text
from train.data.text import load as load_text
from train.task import batch_statistics, images, inside, optimizers, schedules
from train.task import text as texts
from train.task.datasets import Data, load_dataset
from train.task.evaluation import REESTIMATE_BATCHES, Evaluation
from train.task.forward import Forward, TestResult
from train.task.models import MODELS
from train.task.state import TrainState


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """The base optimizer of a configuration with the method around it."""
    rate = schedules.learning_rate(config.optimizer, config.steps)
    return config.method.around(optimizers.make(config.optimizer, rate), rate)


class Experiment:
    """A configuration, built: everything that can be wrong with it is found here.

    Args:
      config: what to build.
      dataset: data (and transforms) to take instead of those that the configuration names.
      warn: called with a line about what is wrong with the data and is no error.
      devices: those to use, all of them; None: as `lj.Workers` chooses them.
      session: the processes of the run; None: this one by itself.

    Attributes:
      workers: the grid.
      forward: the network on a batch.
      data: what lies on the devices for good: of each worker its own training data, or in
        a `Shared` all of them, or nothing if batches bring them along.
      step: (state, data, batch) -> (state, loss [W]), all workers' step.
      evaluation: the tests.

    Raises:
      ValueError: settings that do not go together; DataError: data files that are missing
        or wrong.
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
        self._tx = make_optimizer(config)
        data = load(config) if dataset is None else dataset
        grid, session = config.workers, session or Session()
        self.workers = lj.Workers(
            grid.nodes, grid.locals, devices=devices, inside=grid.axes
        )
        session.connect(self.workers.mesh)
        self.forward = make_forward(config, data, self.workers, warn, session)
        self.data = self.forward.source.data
        self.step = self.workers.map(self._step, donate=0)
        self.evaluation = Evaluation(
            self.forward,
            self.workers,
            config.batch_statistics,
            self.batches,
            count=min(REESTIMATE_BATCHES, self.forward.steps_per_epoch),
            keys=self.worker_keys(),
        )

    def __str__(self) -> str:
        return str(self.workers)

    # State

    def init(self) -> TrainState:
        """The state before the first step: all workers start from the same parameters."""
        start = first_variables(self.forward, self._config.seed)
        specs = inside.specs(self.workers.inside)
        params = self.workers.replicate(start.pop("params"), specs)
        return TrainState(
            params=params,
            stats=self.workers.replicate(start),
            opt_state=self.workers.map(self._tx.init)(params),
            key=self.workers.put(self.worker_keys()),
            step=self.workers.share(jnp.zeros([], jnp.int32)),
        )

    def worker_keys(self) -> Array:
        """A random key of each worker, [W]."""
        return worker_keys(self._config.seed, self.workers.num_workers)

    # Data

    def batches(self, steps: range) -> Generator[Any, None, None]:
        """What each worker learns from at each of the steps (from 0), on the devices."""
        return self.forward.source.batches(steps)

    def batch(self, step: int) -> Any:
        """What each worker learns from at a step (from 0), on the devices."""
        with contextlib.closing(self.batches(range(step, step + 1))) as batches:
            return next(batches)

    def backlog(self) -> Backlog:
        """For steps in flight: as many as the memory for their batches allows."""
        return Backlog(self.forward.source.most_in_flight)

    # Training and testing

    def _step(self, state: TrainState, data: Any, batch: Any) -> tuple[TrainState, Array]:
        """One worker's step: (its state, its data, its batch) -> (state, loss)."""
        key = jax.random.fold_in(state.key, state.step.value)

        def loss_of(params):
            return self.forward.loss(params, state.stats, data, batch, key)

        learn = lj.unrolled(jax.value_and_grad(loss_of, has_aux=True))
        (loss, stats), grads = learn(state.params)
        updates, opt_state = self._tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = lj.apply_updates(state.params, updates)
        if self._config.batch_statistics == "average":
            stats = batch_statistics.averaged(stats, state.opt_state, opt_state)
        step = lj.Shared(state.step.value + 1)
        return TrainState(params, stats, opt_state, state.key, step), loss

    def test_center(self, state: TrainState) -> TestResult:
        """The test of the model that the workers stand for together."""
        return self.evaluation.center(state)

    def test_worker(self, state: TrainState, worker: int) -> TestResult:
        """The test of one worker's own model."""
        return self.evaluation.worker(state, worker)

    def bytes_sent(self, state: TrainState) -> int:
        """Bytes that each worker has sent, by all pulls together."""
        diagnostics = self.workers.fetch(lj.diagnostics(state.opt_state))
        return sum(pull.bytes_sent for pull in diagnostics)

    def sample(self, state: TrainState) -> str:
        """What the center writes; nothing if models of this kind do not write."""
        return self.evaluation.sample(state, jax.random.key(self._config.seed))


def load(config: Config) -> Data | Text:
    """The data that a configuration names; raises as `Experiment` does."""
    if config.data.name == "text":
        return load_text(config.data.files, config.data.tokens)
    return load_dataset(config)


def make_forward(
    config: Config,
    data: Data | Text,
    workers: lj.Workers,
    warn: Callable[[str], None],
    session: Session,
) -> Forward:
    """The network on a batch of some data; the arguments as of `Experiment`."""
    if isinstance(data, Text):
        if not session.same_everywhere(data.sha256):
            raise DataError("the processes read different texts; give all the same")
        return texts.make(config, data, workers)
    model = MODELS[config.model](num_classes=data[0].num_classes)
    return images.make(config, model, data, workers, warn, session)


def first_variables(forward: Forward, seed: int) -> dict[str, Any]:
    """What all workers start from: 'params', and batch statistics if there are any."""

    def init() -> dict[str, Any]:
        key, _ = jax.random.split(jax.random.key(seed))
        return forward.init(key)

    return jax.jit(init, compiler_options=_quickly())()


def worker_keys(seed: int, workers: int) -> Array:
    """A random key of each of so many workers, [W]."""
    _, key = jax.random.split(jax.random.key(seed))
    return jax.random.split(key, workers)


def _quickly() -> dict[str, int]:
    """Options to compile what runs once: on CPUs in a quarter of the time."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
