"""What a configuration stands for: the grid, the data, the step of one worker, the test."""

import contextlib
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import lsgd_jax as lj
from train.cluster.session import Session
from train.config import Config
from train.data import cifar10, digits, imagenet, transforms
from train.data.arrays import DataError, Dataset
from train.data.imagenet import ImageFolder
from train.data.in_flight import Backlog
from train.data.resident import Resident
from train.data.sampler import EpochSampler, parts
from train.data.stream import Stream
from train.task import batch_statistics as statistics
from train.task import optimizers, schedules
from train.task.models import MODELS


TEST_BATCH = 256  # images per worker
REESTIMATE_BATCHES = 8  # per worker


class TrainState(NamedTuple):
    """All that training changes.

    Attributes:
      params: the workers' parameters, [W, ...].
      stats: their batch statistics and whatever else the model keeps, [W, ...].
      stats_state: the state of what averages them, or ().
      opt_state: their optimizers' state.
      key: random key of each worker, [W]; never changes, the step is folded in.
      step: int32 scalar, steps taken; shared.
    """

    params: Any
    stats: Any
    stats_state: Any
    opt_state: Any
    key: Array
    step: lj.Shared[Array]


class TestResult(NamedTuple):
    """error: share of wrong answers in %; loss: mean cross entropy in nats."""

    error: float
    loss: float


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """The base optimizer of a configuration with the method around it."""
    rate = schedules.learning_rate(config.optimizer, config.steps)
    return config.method.around(optimizers.make(config.optimizer, rate), rate)


def load_dataset(config: Config) -> tuple[Dataset | ImageFolder, transforms.Transforms]:
    """The data set and what is done to its images."""
    if config.data.name == "digits":
        return digits.load(), transforms.digits()
    if config.data.name == "imagenet":
        if config.data.dir is None:
            raise ValueError(
                "`data.dir` must name the folder with train/CLASS/*.JPEG and "
                "val/CLASS/*.JPEG, got data.dir=None"
            )
        folder = imagenet.load(config.data.dir, config.data.crop)
        return folder, transforms.imagenet()
    if config.data.dir is None:
        raise ValueError(
            "`data.dir` must name the folder of the official CIFAR-10 files (or their "
            ".tar.gz), got data.dir=None"
        )
    dataset = cifar10.load(config.data.dir, config.data.accept_other_files)
    return dataset, transforms.cifar10(config.data.crop, config.data.padding)


def check_model_fits(config: Config, shape: tuple[int, ...]) -> None:
    """Raises ValueError if the network is made for images of another size."""
    size = getattr(MODELS[config.model], "image_size", None)
    if size not in (None, shape[1]):
        raise ValueError(
            f"`model` must fit the data: {config.model!r} takes {size} x {size} images, "
            f"{config.data.name!r} has {shape[1]} x {shape[2]}"
        )


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
      data: what lies on the devices for good: of each worker its own training images and
        labels, or in a `Shared` all of them, or nothing if batches bring them along.
      data_sizes: the numbers of images and classes, by name.

    Raises:
      ValueError: settings that do not go together; DataError: data files that are missing
        or wrong.
    """

    def __init__(
        self,
        config: Config,
        dataset: tuple[Dataset | ImageFolder, transforms.Transforms] | None = None,
        warn: Callable[[str], None] = warnings.warn,
        devices: Sequence[jax.Device] | None = None,
        session: Session | None = None,
    ):
        self._config = config
        self._tx = make_optimizer(config)
        data, self._transforms = load_dataset(config) if dataset is None else dataset
        self._model = MODELS[config.model](num_classes=data.num_classes)
        self._example = self._transforms.test(jnp.zeros((1, *data.image_shape), jnp.uint8))
        check_model_fits(config, self._example.shape)
        workers = config.workers.nodes * config.workers.locals
        images = len(data.train.labels)
        self.data_sizes = {
            "train_images": images,
            "test_images": len(data.test.labels),
            "classes": data.num_classes,
        }
        size = images // (workers if config.data.shard else 1)
        self.sampler = EpochSampler(size, config.batch_size, config.seed)
        grid = config.workers
        self.workers = lj.Workers(grid.nodes, grid.locals, devices=devices)
        session = Session.single() if session is None else session
        session.connect(self.workers)
        self._source = self._make_source(data, warn, session)
        self.data, self._test_batches = self._source.data, self._source.test_batches
        self._variables = jax.eval_shape(self._init_model)
        self._average_stats = self._make_stats_average()
        self.step = self.workers.map(self._step, donate=0)
        self._reestimate = self.workers.map(self._stats_of_batch)
        self._count_wrong = self.workers.map(self._count_wrong_of_one)
        self._pick = jax.jit(
            lambda params, worker: jax.tree.map(lambda x: x[worker], params),
            out_shardings=self.workers.replicated,
        )

    # State

    def init(self) -> TrainState:
        """The state before the first step: all workers start from the same parameters."""
        start, stats_average = jax.jit(self._init_model)(), self._average_stats
        params = self.workers.replicate(start.pop("params"))
        stats = self.workers.replicate(start)
        init_stats = stats_average.init if stats_average else lambda stats: ()
        return TrainState(
            params=params,
            stats=stats,
            stats_state=self.workers.map(init_stats)(stats),
            opt_state=self.workers.map(self._tx.init)(params),
            key=self.workers.put(self._worker_keys()),
            step=self.workers.share(jnp.zeros([], jnp.int32)),
        )

    def _init_model(self) -> dict[str, Any]:
        key, _ = jax.random.split(jax.random.key(self._config.seed))
        return dict(self._model.init(key, self._example, train=False))

    def _worker_keys(self) -> Array:
        _, key = jax.random.split(jax.random.key(self._config.seed))
        return jax.random.split(key, self.workers.num_workers)

    def _make_stats_average(self) -> optax.GradientTransformationExtraArgs | None:
        stats = {k: v for k, v in self._variables.items() if k != "params"}
        stacked = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.workers.num_workers, *x.shape), x.dtype),
            self._variables["params"],
        )
        opt_state = jax.eval_shape(self.workers.map(self._tx.init), stacked)
        return statistics.averaging(self._config.batch_statistics, stats, opt_state)

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
        return self._source.batches(steps)

    def batch(self, step: int) -> Any:
        """What each worker learns from at a step (from 0), on the devices."""
        with contextlib.closing(self.batches(range(step, step + 1))) as batches:
            return next(batches)

    def backlog(self) -> Backlog:
        """For steps on their way: as many as the memory for their batches allows."""
        return Backlog(self._source.most_in_flight)

    # One worker's step

    def _apply(self, params: Any, stats: Any, key: Array, images: Array) -> tuple[Any, Any]:
        """The logits while training, and the renewed statistics."""
        variables, rngs = {"params": params, **stats}, {"dropout": key}
        return self._model.apply(variables, images, True, rngs=rngs, mutable=list(stats))

    def _step(self, state: TrainState, data: Any, batch: Any) -> tuple[TrainState, Array]:
        """One worker's step: (its state, its data, its batch) -> (state, loss)."""
        images, labels = self._source.images_and_labels(data, batch)
        key = jax.random.fold_in(state.key, state.step.value)
        image_key, dropout_key = jax.random.split(key)
        x = self._transforms.train(image_key, images)

        def loss_of(params):
            logits, stats = self._apply(params, state.stats, dropout_key, x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), stats

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = self._tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = lj.apply_updates(state.params, updates)
        stats, stats_state = statistics.averaged(
            self._average_stats, stats, state.stats_state
        )
        step = lj.Shared(state.step.value + 1)
        return TrainState(params, stats, stats_state, opt_state, state.key, step), loss

    # Testing: reads the training state and leaves it alone

    def test_center(self, state: TrainState) -> TestResult:
        """The test of the model that the workers stand for together."""
        center = lj.center(state.params, state.opt_state)
        return self._test(center, lj.consensus(state.stats) if state.stats else {})

    def test_worker(self, state: TrainState, worker: int) -> TestResult:
        """The test of one worker's own model."""
        return self._test(*self._pick((state.params, state.stats), worker))

    def _test(self, params: Any, stats: Any) -> TestResult:
        if stats and self._config.batch_statistics == "reestimate":
            stats = self._stats_from_data(params, stats)
        variables = lj.Shared({"params": params, **stats})
        add = self.backlog().add
        totals = [add(self._count_wrong(variables, *batch)) for batch in self._test_batches]
        wrong, loss, count = np.sum(self.workers.fetch(totals), axis=(0, 2))
        if not count:
            raise DataError("no image to test with can be read any more")
        return TestResult(error=float(100 * wrong / count), loss=float(loss / count))

    def _count_wrong_of_one(self, variables, images, labels, valid):
        logits: Any = self._model.apply(
            variables.value, self._transforms.test(images), False
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        wrong = logits.argmax(axis=1) != labels
        return (wrong & valid).sum(), jnp.where(valid, losses, 0).sum(), valid.sum()

    def _stats_from_data(self, params: Any, stats: Any) -> Any:
        """The mean statistics of some batches of every worker, with these parameters."""
        keys = self.workers.put(self._worker_keys())
        shared = lj.Shared((params, stats))
        batches = min(REESTIMATE_BATCHES, self.sampler.steps_per_epoch)
        add = self.backlog().add
        seen = [
            lj.consensus(add(self._reestimate(shared, self.data, batch, keys)))
            for batch in self.batches(range(batches))
        ]
        return jax.tree.map(lambda *each: sum(each) / batches, *seen)

    def _stats_of_batch(self, variables, data, batch, key):
        params, stats = variables.value
        images, _ = self._source.images_and_labels(data, batch)
        image_key, dropout_key = jax.random.split(key)
        x = self._transforms.train(image_key, images)
        apply = lambda stats: self._apply(params, stats, dropout_key, x)
        return statistics.of_batch(apply, stats)


def _cores() -> int:
    """CPU cores that this process may use, as far as Python tells."""
    count = getattr(os, "process_cpu_count", os.cpu_count)()  # the former: Python 3.13
    return count or 1
