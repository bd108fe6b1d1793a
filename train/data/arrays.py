"""A dataset of images and labels in host memory."""

import hashlib
from typing import NamedTuple

import numpy as np


class DataError(ValueError):
    """Data files are missing or wrong; the message says what is expected."""


class Images(NamedTuple):
    """Images and their labels. Arrays of other shapes count as images.

    Attributes:
      images: uint8 [N, H, W, C], or float32 [N, ...].
      labels: int32 [N].
    """

    images: np.ndarray
    labels: np.ndarray


class Dataset(NamedTuple):
    """Images for training and for testing.

    Attributes:
      train, test: images of the same shape [H, W, C], or arrays of the same shape.
      num_classes: labels are 0 to num_classes - 1.
    """

    train: Images
    test: Images
    num_classes: int

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of an image: [H, W, C]."""
        return self.train.images.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """The type of the images: uint8, or float32."""
        return self.train.images.dtype

    def digest(self) -> str:
        """A hash of all images and labels."""
        whole = hashlib.sha256()
        for array in (*self.train, *self.test):
            whole.update(f"{array.shape}{array.dtype}".encode())
            whole.update(np.ascontiguousarray(array).data)
        return whole.hexdigest()
