"""What a configuration stands for: the grid, the data, the step of one worker, the test."""

import contextlib
import os
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
from train.data.arrays import Dataset
from train.data.imagenet import ImageFolder
from train.data.in_flight import Backlog
from train.data.resident import Resident
from train.data.sampler import EpochSampler, parts
from train.data.stream import Stream
from train.data.transforms import Transforms
from train.task import batch_statistics, optimizers, schedules
from train.task.datasets import check_model_fits, load_dataset
from train.task.evaluation import REESTIMATE_BATCHES, TEST_BATCH, Evaluation, TestResult
from train.task.forward import Forward, cross_entropy
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
      dataset: data and transforms to take instead of those that the configuration names.
      warn: called with a line about what is wrong with the data and is no error.
      devices: those to use, all of them; None: as `lj.Workers` chooses them.
      session: the processes of the run; None: this one by itself.

    Attributes:
      workers: the grid.
      sampler: which images each worker sees at which step.
      forward: the network on a batch.
      data: what lies on the devices for good: of each worker its own training images and
        labels, or in a `Shared` all of them, or nothing if batches bring them along.
      data_sizes: the numbers of images and classes, by name.
      step: (state, data, batch) -> (state, loss [W]), all workers' step.
      evaluation: the tests.

    Raises:
      ValueError: settings that do not go together; DataError: data files that are missing
        or wrong.
    """

    def __init__(
        self,
        config: Config,
        dataset: tuple[Dataset | ImageFolder, Transforms] | None = None,
        warn: Callable[[str], None] = warnings.warn,
        devices: Sequence[jax.Device] | None = None,
        session: Session | None = None,
    ):
        self._config = config
        self._tx = make_optimizer(config)
        data, transforms = load_dataset(config) if dataset is None else dataset
        model = MODELS[config.model](num_classes=data.num_classes)
        self._example = transforms.test(jnp.zeros((1, *data.image_shape), jnp.uint8))
        check_model_fits(config, self._example.shape)
        grid, images = config.workers, len(data.train.labels)
        self.data_sizes = {
            "train_images": images,
            "test_images": len(data.test.labels),
            "classes": data.num_classes,
        }
        size = images // (grid.nodes * grid.locals if config.data.shard else 1)
        self.sampler = EpochSampler(size, config.batch_size, config.seed)
        self.workers = lj.Workers(grid.nodes, grid.locals, devices=devices)
        session = Session.single() if session is None else session
        session.connect(self.workers)
        source = self._make_source(data, warn, session)
        self.data = source.data
        self.forward = Forward(model, transforms, source)
        self.step = self.workers.map(self._step, donate=0)
        self.evaluation = Evaluation(
            self.forward,
            self.workers,
            config.batch_statistics,
            self.batches,
            count=min(REESTIMATE_BATCHES, self.sampler.steps_per_epoch),
            keys=self.worker_keys(),
        )

    # State

    def init(self) -> TrainState:
        """The state before the first step: all workers start from the same parameters."""
        start = jax.jit(self._init_model)()
        params = self.workers.replicate(start.pop("params"))
        return TrainState(
            params=params,
            stats=self.workers.replicate(start),
            opt_state=self.workers.map(self._tx.init)(params),
            key=self.workers.put(self.worker_keys()),
            step=self.workers.share(jnp.zeros([], jnp.int32)),
        )

    def _init_model(self) -> dict[str, Any]:
        key, _ = jax.random.split(jax.random.key(self._config.seed))
        return dict(self.forward.model.init(key, self._example, train=False))

    def worker_keys(self) -> Array:
        """A random key of each worker, [W]."""
        _, key = jax.random.split(jax.random.key(self._config.seed))
        return jax.random.split(key, self.workers.num_workers)

    # Data

    def _make_source(
        self, data: Dataset | ImageFolder, warn: Callable[[str], None], session: Session
    ) -> Resident | Stream:
        options, seed = self._config.data, self._config.seed
        count, workers = len(data.train.labels), self.workers.num_workers
        own = parts(count, workers, seed) if options.shard else None
        common = self.sampler, self.workers, own, TEST_BATCH
        if isinstance(data, Dataset):
            return Resident(data, *common)
        return Stream(
            data,
            *common,
            seed=seed,
            threads=options.reader_threads or _cores(),
            ahead=options.read_ahead,
            warn=warn,
            same_everywhere=session.same_everywhere,
        )

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
        x, labels, key = self.forward.prepared(data, batch, key)

        def loss_of(params):
            logits, stats = self.forward.train(params, state.stats, key, x)
            return cross_entropy(logits, labels).mean(), stats

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
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


def _cores() -> int:
    """CPU cores that this process may use, as far as Python tells."""
    count = getattr(os, "process_cpu_count", os.cpu_count)()  # the former: Python 3.13
    return count or 1
