"""A dataset: images and labels in the host's memory."""

import dataclasses

import numpy as np

import lsgd_jax as lj


class DataError(ValueError):
    """The data files are missing or wrong; the message says what would be right."""


@dataclasses.dataclass(frozen=True)
class Images:
    """Images and their labels.

    Attributes:
      images: uint8 [N, H, W, C].
      labels: int32 [N].
    """

    images: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images to train on and images to test with.

    Attributes:
      train, test: images of one shape [H, W, C].
      num_classes: labels are 0 to num_classes - 1.

    Raises:
      ValueError: arrays of other shapes or dtypes, no images, a label out of range.
    """

    train: Images
    test: Images
    num_classes: int

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of an image: [H, W, C]."""
        return self.train.images.shape[1:]

    def __post_init__(self) -> None:
        lj.checks.check_positive_int("num_classes", self.num_classes)
        for name, part in (("train", self.train), ("test", self.test)):
            images, labels, most = part.images, part.labels, self.num_classes - 1
            if images.dtype != np.uint8 or images.ndim != 4 or 0 in images.shape:
                raise ValueError(
                    f"the images of `{name}` must be uint8 [N, H, W, C] and not empty, got "
                    f"{images.dtype} {list(images.shape)}"
                )
            if labels.dtype != np.int32 or labels.shape != images.shape[:1]:
                raise ValueError(
                    f"the labels of `{name}` must be int32 [{len(images)}], one per image, "
                    f"got {labels.dtype} {list(labels.shape)}"
                )
            if labels.min() < 0 or labels.max() > most:
                raise ValueError(
                    f"the labels of `{name}` must be in 0..{most}, got {labels.min()}.."
                    f"{labels.max()}"
                )
        train, test = self.train.images.shape[1:], self.test.images.shape[1:]
        if train != test:
            raise ValueError(
                "the images of `train` and `test` must be of one shape, got "
                f"{list(train)} and {list(test)}"
            )
