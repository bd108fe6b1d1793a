"""The digits of scikit-learn, and their split."""

import importlib.util
from unittest.mock import Mock

import numpy as np
import pytest

from train.data import digits


@pytest.mark.parametrize("moved", [False, True])
def test_the_digits_have_the_documented_split(moved, monkeypatch):
    from sklearn.datasets import load_digits  # takes a second

    original = load_digits()
    if moved:  # another version of scikit-learn keeps its file elsewhere
        monkeypatch.setattr(np, "loadtxt", Mock(side_effect=FileNotFoundError))
        monkeypatch.setattr("sklearn.datasets.load_digits", lambda: original)
    np.random.seed(5)  # has no effect
    dataset = digits.load()
    assert dataset.num_classes == 10
    for part, count in ((dataset.train, 1437), (dataset.test, 360)):
        assert part.images.shape == (count, 8, 8, 1) and part.labels.shape == (count,)
    order = np.random.RandomState(0).permutation(1797)
    images = np.concatenate([dataset.train.images, dataset.test.images])[..., 0]
    labels = np.concatenate([dataset.train.labels, dataset.test.labels])
    # Since 255 / 16 > 1, rounding keeps all 17 values apart.
    np.testing.assert_array_equal(np.rint(images / 255 * 16), original.images[order])
    np.testing.assert_array_equal(labels, original.target[order])
    assert images.min() == 0 and images.max() == 255
    assert dataset.train.labels[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]
    assert dataset.test.labels[:10].tolist() == [7, 9, 4, 7, 0, 2, 6, 1, 3, 1]


def test_a_missing_scikit_learn_is_reported(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install -e ".\[train\]"'):
        digits.load()
