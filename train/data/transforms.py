"""Transforms from the bytes of a batch to a network's input, inside the jitted step.

A transform maps uint8 images [B, H, W, C] to float32 [B, h, w, C], and other arrays to
float32 arrays. Transforms for training also take a random key.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Transforms(NamedTuple):
    """The transforms of a data set: train(key, images) and test(images)."""

    train: Callable[[Array, Array], Array]
    test: Callable[[Array], Array]


def normalize(images: Array, mean: tuple[float, ...], std: tuple[float, ...]) -> Array:
    """(x / 255 - mean) / std per channel.

    >>> float(normalize(jnp.full((1, 1, 1, 1), 255, jnp.uint8), (0.5,), (0.5,)).squeeze())
    1.0
    """

    def per_channel(values):
        return jnp.asarray(values, jnp.float32)[None, None, None]

    return (images.astype(jnp.float32) / 255 - per_channel(mean)) / per_channel(std)


def center_crop(images: Array, size: int) -> Array:
    """The size x size pixels in the middle."""
    top, left = ((length - size) // 2 for length in images.shape[1:3])
    return images[:, top : top + size, left : left + size]


def random_crop_flip(key: Array, images: Array, size: int) -> Array:
    """A random size x size part of each image, flipped horizontally half of the time."""
    batch, height, width, channels = images.shape
    corner_key, flip_key = jax.random.split(key)
    most = jnp.array([height - size, width - size], jnp.int32)[None]
    corners = jax.random.randint(corner_key, (batch, 2), 0, most + 1)

    def crop(image, corner):
        return jax.lax.dynamic_slice(image, (*corner, 0), (size, size, channels))

    return random_flip(flip_key, jax.vmap(crop)(images, corners))


def random_flip(key: Array, images: Array) -> Array:
    """Each image, flipped horizontally half of the time."""
    flip = jax.random.bernoulli(key, 0.5, (len(images), 1, 1, 1))
    return jnp.where(flip, images[:, :, ::-1], images)


def digits() -> Transforms:
    """Scaling only, for the handwritten digits."""

    def scale(images):
        return normalize(images, (0.305,), (0.376,))

    return Transforms(train=lambda key, images: scale(images), test=scale)


def cifar10(size: int = 28, padding: int = 0) -> Transforms:
    """Random crops and flips for training, center crops for testing, as in LSGD's code.

    Args:
      size: side of the crops.
      padding: width of the black border that is added before a random crop.
    """
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2023, 0.1994, 0.2010)

    def scale(images):
        return normalize(images, mean, std)

    border = ((0, 0), (padding, padding), (padding, padding), (0, 0))

    def pad(images):
        return jnp.pad(images, border) if padding else images

    return Transforms(
        train=lambda key, images: scale(random_crop_flip(key, pad(images), size)),
        test=lambda images: scale(center_crop(images, size)),
    )


def imagenet() -> Transforms:
    """Random flips for training. Images are cropped when they are read."""

    def scale(images):
        return normalize(images, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

    return Transforms(train=lambda key, images: scale(random_flip(key, images)), test=scale)


def arrays() -> Transforms:
    """Scaling of uint8 arrays to [-1, 1]. Arrays of float32 stay as they are.

    >>> float(arrays().test(jnp.full((1, 1), 255, jnp.uint8)).squeeze())
    1.0
    """

    def scale(inputs: Array) -> Array:
        if inputs.dtype != jnp.uint8:
            return inputs
        return inputs.astype(jnp.float32) / 127.5 - 1

    return Transforms(train=lambda key, inputs: scale(inputs), test=scale)
