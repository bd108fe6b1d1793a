"""Classification of images."""

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array

from train.cluster.session import Session
from train.config.schema import Config
from train.data import held_out
from train.data.arrays import DataError, Dataset
from train.data.imagenet import ImageFolder
from train.data.resident import Resident
from train.data.sampler import sampled
from train.data.stream import Stream
from train.data.transforms import Transforms
from train.task.datasets import check_model_fits, class_names
from train.task.forward import Forward, TestResult
from train.task.inside import split_batch


CLASSES = "classes.json"
TEST_BATCH = 256  # images per worker


class ImageForward(Forward):
    """Classifies images.

    Args:
      config: the configuration.
      model: the network.
      dataset: the images and their transforms.
      place, warn, session: see `train.task.experiment.Task`.

    Raises:
      ValueError: the network needs images of another size, or the batch exceeds the data.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        dataset: tuple[Dataset | ImageFolder, Transforms],
        place: Any,
        warn: Callable[[str], None],
        session: Session,
    ):
        data, self.transforms = dataset
        self.model = model
        self._example = self.transforms.test(jnp.zeros((1, *data.image_shape), data.dtype))
        check_model_fits(config, self._example.shape)
        self._digest = functools.cache(data.digest)
        if not session.is_alone and not session.same_everywhere(self._digest()):
            raise DataError("all processes must read the same images")
        options = config.data
        self._classes = class_names(config, data)
        self._shape = None
        if options.name == "arrays":  # the shape of other images is in the configuration
            self._shape = list(data.image_shape)
        self.held_out: Any = None
        files = None
        num_held_out = config.method.num_held_out
        if num_held_out and isinstance(data, ImageFolder):
            data, files = held_out.files(data, num_held_out)
        elif num_held_out and isinstance(data, Dataset):
            data, self.held_out = held_out.examples(data, num_held_out)
        count = len(data.train.labels)
        seed = config.seed
        sampler, own = sampled(
            count, place.num_workers, config.batch_size, seed, options.shard
        )
        if isinstance(data, Dataset):
            self.source = Resident(data, sampler, place, own, TEST_BATCH)
        else:
            self.source = Stream(
                data,
                sampler,
                place,
                own,
                TEST_BATCH,
                seed=seed,
                threads=options.reader_threads or _cores(),
                ahead=options.read_ahead,
                warn=warn,
            )
            if files is not None:
                self.held_out = self.source.center_crops(files)
        self.sizes = {
            "train_images": count,
            "test_images": len(data.test.labels),
            "classes": data.num_classes,
        }
        self.guess = 100 * (1 - 1 / data.num_classes)

    @functools.cached_property
    def kept(self) -> dict[str, str]:  # type: ignore  # hashing takes a while
        described: dict[str, Any] = {
            "classes": self._classes,
            "sha256": self._digest(),
        }
        if self._shape is not None:
            described["shape"] = self._shape
        return {CLASSES: json.dumps(described) + "\n"}

    def init(self, key: Array) -> dict[str, Any]:
        return dict(self.model.init(key, self._example, train=False))

    def loss(
        self, params: Any, stats: Any, data: Any, batch: Any, key: Array
    ) -> tuple[Array, Any]:
        images, labels = split_batch(self.source.examples(data, batch))
        image_key, dropout_key = jax.random.split(key)
        x = self.transforms.train(image_key, images)
        logits, stats = self.train(params, stats, dropout_key, x)
        return cross_entropy(logits, labels).mean(), stats

    def train(self, params: Any, stats: Any, key: Array, x: Array) -> tuple[Any, Any]:
        """The logits in training, and the updated statistics."""
        variables = {"params": params, **stats}
        rngs = {"dropout": key}
        return self.model.apply(variables, x, True, rngs=rngs, mutable=list(stats))

    def sums(self, variables: Any, *batch: Array) -> tuple[Array, ...]:
        images, labels, valid = split_batch(batch)
        logits: Any = self.model.apply(variables, self.transforms.test(images), False)
        losses = cross_entropy(logits, labels)
        wrong = logits.argmax(axis=1) != labels
        return (wrong & valid).sum(), jnp.where(valid, losses, 0).sum(), valid.sum()

    def mean_loss(self, sums: Any) -> Any:
        _, loss, count = sums
        return loss / count

    def result(self, totals: Any) -> TestResult:
        """error: share of wrong predictions in %; loss: mean cross entropy in nats."""
        wrong, _, count = totals
        if not count:
            raise DataError("no test image can be read any more")
        error = float(100 * wrong / count)
        return {"error": error, "loss": float(self.mean_loss(totals))}


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The cross entropy of each image, in nats: ([B, classes], [B]) -> [B].

    >>> cross_entropy(jnp.zeros((1, 2)), jnp.array([1])).round(3).tolist()
    [0.693]
    """
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _cores() -> int:
    """The number of CPU cores that this process may use, as far as Python knows.

    A batch system or a container may give a process some of the cores of its host.
    """
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
