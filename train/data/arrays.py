"""A dataset of images and labels in host memory."""

import hashlib
from typing import NamedTuple

import numpy as np


class DataError(ValueError):
    """Data files are missing or wrong; the message says what is expected."""


class Images(NamedTuple):
    """Images and their labels.

    Attributes:
      images: uint8 [N, H, W, C].
      labels: int32 [N].
    """

    images: np.ndarray
    labels: np.ndarray


class Dataset(NamedTuple):
    """Images for training and for testing.

    Attributes:
      train, test: images of the same shape [H, W, C].
      num_classes: labels are 0 to num_classes - 1.
    """

    train: Images
    test: Images
    num_classes: int

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of an image: [H, W, C]."""
        return self.train.images.shape[1:]

    def digest(self) -> str:
        """A hash of all images and labels."""
        whole = hashlib.sha256()
        for array in (*self.train, *self.test):
            whole.update(f"{array.shape}{array.dtype}".encode())
            whole.update(np.ascontiguousarray(array).data)
        return whole.hexdigest()
