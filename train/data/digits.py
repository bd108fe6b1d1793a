"""The handwritten digits that scikit-learn includes: data without a download."""

import importlib.util
import pathlib
from typing import Any

import numpy as np

from train.data.arrays import Dataset, Images


NUM_TRAIN = 1437
SEED = 0


def load() -> Dataset:
    """Reads scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, 10 classes.

    The values 0..16 are scaled to 0..255 and rounded. The split is always the same: in the
    order of `numpy.random.RandomState(0).permutation(1797)`, the first 1,437 images are for
    training and the last 360 for testing.

    Returns:
      The digits; images uint8 [N, 8, 8, 1].

    Raises:
      ImportError: scikit-learn is not installed.

    >>> digits = load()
    >>> digits.train.images.shape, digits.test.images.shape, digits.num_classes
    ((1437, 8, 8, 1), (360, 8, 8, 1), 10)
    """
    table = _table()
    images = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = table[:, -1].astype(np.int32)
    # NumPy guarantees that the stream of RandomState never changes; Generator may change.
    order = np.random.RandomState(SEED).permutation(len(labels))
    parts = (Images(images[rows], labels[rows]) for rows in np.split(order, [NUM_TRAIN]))
    return Dataset(*parts, num_classes=10)


def _table() -> Any:
    """The 64 values and the class of each digit, [1797, 65].

    They are read from scikit-learn's file, because importing it takes a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ImportError(
            "the digits are part of scikit-learn, which is not installed: "
            'pip install -e ".[train]" in a checkout of lsgd_jax'
        )
    folder = pathlib.Path(package.submodule_search_locations[0]) / "datasets" / "data"
    try:
        return np.loadtxt(folder / "digits.csv.gz", delimiter=",")
    except OSError:  # another version keeps the file elsewhere
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        return np.column_stack([digits.data, digits.target])
