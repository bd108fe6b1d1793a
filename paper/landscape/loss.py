"""The loss at a point of parameter space.

The mean cross entropy over a fixed set of images, cropped as for the test, without dropout.
Batch statistics are those of the very images at the very point, whatever the run's policy:
with statistics that belong to other parameters one would see those instead of the
parameters, and between two workers no worker's own are right.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from paper.landscape.saved_run import SavedRun
from train.data.arrays import Images
from train.task import batch_statistics as statistics
from train.task.models import MODELS


IMAGES_AT_ONCE = 128
MOST_POINTS = 16  # per device and call

Batch = tuple[np.ndarray, np.ndarray]
Measure = Callable[[Any, Any], Array]


def batches_of(images: Images, count: int, seed: int) -> list[Batch]:
    """About so many images, drawn once, and their labels, in batches of equal size.

    >>> some = Images(np.zeros((300, 8, 8, 1), np.uint8), np.zeros(300, np.int32))
    >>> [len(labels) for _, labels in batches_of(some, 257, seed=0)]
    [85, 85, 85]
    """
    order = np.random.default_rng(seed).permutation(len(images.labels))[:count]
    batches = -(-len(order) // IMAGES_AT_ONCE)
    rows = order[: len(order) // batches * batches].reshape(batches, -1)
    return [(images.images[chosen], images.labels[chosen]) for chosen in rows]


def measure_of(run: SavedRun) -> Measure:
    """(params [P], (images, labels)) -> [loss, wrong answers], summed over the images."""
    dataset, transforms = run.data
    model = MODELS[run.config.model](num_classes=dataset.num_classes)
    of_one = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), tree)
    _, as_tree = ravel_pytree(of_one(run.state.params))
    like = of_one(run.state.stats)
    rngs = {"dropout": jax.random.key(0)}  # in case statistics stand behind a dropout

    def measure(point, batch):
        images, labels = batch
        x, params = transforms.test(images), as_tree(point)

        def renew(stats):
            variables = {"params": params, **stats}
            return model.apply(variables, x, True, rngs=rngs, mutable=list(stats))

        stats = statistics.of_batch(renew, like) if like else {}
        logits: Any = model.apply({"params": params, **stats}, x, False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        wrong = jnp.sum(logits.argmax(axis=1) != labels)
        return jnp.stack([losses.sum(), wrong.astype(losses.dtype)])

    return measure


def fitting_chunk(measure: Measure, point: Any, batch: Batch, device: Any) -> int:
    """How many points a device takes at a time: what fits into half of its free memory.

    1 on a CPU, where convolutions with vmapped kernels take five to ten times as long as
    the same one after the other.
    """
    if device.platform == "cpu":
        return 1
    memory = device.memory_stats() or {}
    free = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
    analysis: Any = jax.jit(measure).lower(point, batch).compile().memory_analysis()
    each = analysis.temp_size_in_bytes + point.nbytes
    return int(np.clip(free // (2 * each), 1, MOST_POINTS))
