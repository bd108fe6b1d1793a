"""The loss at a point of parameter space.

It is the mean cross entropy over a fixed set of images, cropped as in a test, without
dropout. Batch statistics are computed from these images at the point itself, whatever the
policy of the run: no worker's statistics belong to a point between two workers, and wrong
ones would change the loss more than the parameters do.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

import lsgd_jax as lj
from paper.landscape import plane
from paper.landscape.saved_run import SavedRun
from train.data import imagenet
from train.data.arrays import Images
from train.data.imagenet import ImageFolder
from train.metrics.progress import Progress
from train.run.stopwatch import Pace
from train.task import batch_statistics as statistics


IMAGES_AT_ONCE = 128

Batch = tuple[np.ndarray, np.ndarray]
Measure = Callable[[Any, Any], Array]


class Map(NamedTuple):
    """The loss and the error in %, each [G, G] with a row for each y.

    Attributes:
      name: the images, 'train' or 'test'.
      images: their number.
    """

    name: str
    images: int
    loss: np.ndarray
    error: np.ndarray


def batches_of(images: Images, count: int, seed: int) -> list[Batch]:
    """Draws about `count` images and their labels, in batches of equal size.

    >>> some = Images(np.zeros((300, 8, 8, 1), np.uint8), np.zeros(300, np.int32))
    >>> [len(labels) for _, labels in batches_of(some, 257, seed=0)]
    [85, 85, 85]
    """
    order = np.random.default_rng(seed).permutation(len(images.labels))[:count]
    batches = -(-len(order) // IMAGES_AT_ONCE)
    rows = order[: len(order) // batches * batches].reshape(batches, -1)
    return [(images.images[chosen], images.labels[chosen]) for chosen in rows]


def measure_of(run: SavedRun) -> Measure:
    """Returns (params [P], (images, labels)) -> sums of [loss, wrong answers]."""
    forward: Any = run.experiment.forward

    def of_one(tree):
        return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), tree)

    _, as_tree = ravel_pytree(of_one(run.state.params))
    like = of_one(run.state.stats)
    key = jax.random.key(0)  # a dropout may precede the statistics

    def measure(point, batch):
        images, labels = batch
        x = forward.transforms.test(images)
        params = as_tree(point)

        def renew(stats):
            return forward.train(params, stats, key, x)

        stats = statistics.of_batch(renew, like) if like else {}
        everywhere = jnp.ones(len(labels), bool)
        wrong, loss, _ = forward.sums({"params": params, **stats}, *batch, everywhere)
        return jnp.stack([loss, wrong.astype(loss.dtype)])

    return measure


def measured(
    run: SavedRun,
    on: plane.Plane,
    places: np.ndarray,
    name: str,
    images: int,
    say: Callable[[str], None],
) -> Map:
    """Measures loss and error, [N], at places [N, 2], over 'train' or 'test' images.

    All devices share the work.
    """
    data = run.data[0]
    seed = run.config.seed
    part = getattr(data, name)
    if isinstance(data, ImageFolder):
        part = imagenet.some(part, images, seed, data.image_size)
    batches = batches_of(part, images, seed)
    count = sum(len(labels) for _, labels in batches)
    say(f"measuring {len(places)} points over {count} {name} images")
    pace = Pace(at_least=0)
    devices = lj.Workers(1, len(jax.devices()))
    with Progress(len(places), what="point") as progress:

        def show(done):
            return progress.show(done, None, pace(done, time.monotonic()))

        sums = plane.evaluate(measure_of(run), on, places, batches, devices, show)
    return Map(name, count, sums[:, 0] / count, 100 * sums[:, 1] / count)
