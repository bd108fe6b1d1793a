"""A dataset: images and labels in the host's memory."""

from typing import NamedTuple

import numpy as np


class DataError(ValueError):
    """The data files are missing or wrong; the message says what would be right."""


class Images(NamedTuple):
    """Images and their labels.

    Attributes:
      images: uint8 [N, H, W, C].
      labels: int32 [N].
    """

    images: np.ndarray
    labels: np.ndarray


class Dataset(NamedTuple):
    """Images to train on and images to test with.

    Attributes:
      train, test: images of one shape [H, W, C].
      num_classes: labels are 0 to num_classes - 1.
    """

    train: Images
    test: Images
    num_classes: int

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of an image: [H, W, C]."""
        return self.train.images.shape[1:]
