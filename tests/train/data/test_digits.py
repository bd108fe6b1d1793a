"""The digits are scikit-learn's, split the same way always."""

import importlib.util

import numpy as np
import pytest
from sklearn.datasets import load_digits

from train.data import digits


ORIGINAL = load_digits()


@pytest.fixture(scope="module")
def dataset():
    return digits.load()


def test_shapes_and_dtypes(dataset):
    assert dataset.num_classes == 10
    for part, count in ((dataset.train, 1437), (dataset.test, 360)):
        assert part.images.shape == (count, 8, 8, 1)
        assert part.images.dtype == np.uint8
        assert part.labels.shape == (count,)
        assert part.labels.dtype == np.int32
        assert set(part.labels.tolist()) == set(range(10))


def test_is_the_stated_split_of_the_stated_data(dataset):
    order = np.random.RandomState(0).permutation(1797)
    images = np.concatenate([dataset.train.images, dataset.test.images])[..., 0]
    labels = np.concatenate([dataset.train.labels, dataset.test.labels])
    # 255 / 16 is more than 1, so rounding loses none of the 17 values.
    np.testing.assert_array_equal(np.rint(images / 255 * 16), ORIGINAL.images[order])
    np.testing.assert_array_equal(labels, ORIGINAL.target[order])
    assert images.min() == 0 and images.max() == 255


def test_the_split_does_not_move(dataset):
    assert dataset.train.labels[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]
    assert dataset.test.labels[:10].tolist() == [7, 9, 4, 7, 0, 2, 6, 1, 3, 1]


def test_is_the_same_every_time(dataset):
    np.random.seed(5)
    again = digits.load()
    for part in ("train", "test"):
        one, other = getattr(dataset, part), getattr(again, part)
        np.testing.assert_array_equal(one.images, other.images)
        np.testing.assert_array_equal(one.labels, other.labels)


def test_is_the_same_if_the_file_lies_elsewhere(dataset, monkeypatch):
    def missing(path, **_):
        raise FileNotFoundError(path)

    monkeypatch.setattr(np, "loadtxt", missing)
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda: ORIGINAL)
    again = digits.load()
    np.testing.assert_array_equal(again.train.images, dataset.train.images)
    np.testing.assert_array_equal(again.test.labels, dataset.test.labels)


def test_says_how_to_get_scikit_learn(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "lsgd_jax\[train\]"'):
        digits.load()
