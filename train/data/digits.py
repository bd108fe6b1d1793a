"""Handwritten digits, as they come with scikit-learn: data that needs no download."""

from typing import Any

import numpy as np

from train.data.arrays import Dataset, Images


NUM_TRAIN = 1437
SEED = 0


def load() -> Dataset:
    """scikit-learn's handwritten digits: 1,797 images of 8 x 8 gray values, 10 classes.

    The values 0..16 are scaled to 0..255 and rounded. The split is always the same: of
    `numpy.random.RandomState(0).permutation(1797)` the first 1,437 images are for
    training and the last 360 for testing.

    Returns:
      The digits; images uint8 [N, 8, 8, 1].

    Raises:
      ImportError: scikit-learn is not installed.

    >>> digits = load()
    >>> digits.train.images.shape, digits.test.images.shape, digits.num_classes
    ((1437, 8, 8, 1), (360, 8, 8, 1), 10)
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which cannot be imported here: "
            f'pip install "lsgd_jax[train]" ({error})'
        ) from error
    digits: Any = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int32)
    # NumPy guarantees that what RandomState draws never changes; Generator may change.
    order = np.random.RandomState(SEED).permutation(len(labels))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return Dataset(
        train=Images(images[train], labels[train]),
        test=Images(images[test], labels[test]),
        num_classes=10,
    )
