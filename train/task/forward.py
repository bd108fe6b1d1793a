"""One worker's network applied to a batch, for training and for testing."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import optax
from jax import Array

from train.data.resident import Resident
from train.data.stream import Stream
from train.data.transforms import Transforms


class Forward(NamedTuple):
    """From a batch to logits.

    Attributes:
      model: the network.
      transforms: what is done to the images before.
      source: where batches come from.
    """

    model: nn.Module
    transforms: Transforms
    source: Resident | Stream

    def prepared(self, data: Any, batch: Any, key: Array) -> tuple[Array, Array, Array]:
        """A training batch: (the network's input, labels, key for what is left to draw)."""
        images, labels = self.source.images_and_labels(data, batch)
        image_key, dropout_key = jax.random.split(key)
        return self.transforms.train(image_key, images), labels, dropout_key

    def train(self, params: Any, stats: Any, key: Array, x: Array) -> tuple[Any, Any]:
        """The logits while training, and the renewed statistics."""
        variables, rngs = {"params": params, **stats}, {"dropout": key}
        return self.model.apply(variables, x, True, rngs=rngs, mutable=list(stats))

    def test(self, variables: Any, images: Array) -> Any:
        """The logits while testing."""
        return self.model.apply(variables, self.transforms.test(images), False)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The cross entropy of each image, in nats: ([B, classes], [B]) -> [B].

    >>> import jax.numpy as jnp
    >>> cross_entropy(jnp.zeros((1, 2)), jnp.array([1])).round(3).tolist()
    [0.693]
    """
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
