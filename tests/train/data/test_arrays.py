"""A dataset refuses arrays that are not what it says they are."""

import dataclasses

import numpy as np
import pytest

from train.data.arrays import DataError, Dataset, Images


def some(count=6, shape=(4, 5, 3), classes=3):
    images = np.zeros((count, *shape), np.uint8)
    return Images(images, np.arange(count, dtype=np.int32) % classes)


def test_good_arrays_are_kept_as_they_are():
    train, test = some(6), some(3)
    dataset = Dataset(train=train, test=test, num_classes=3)
    assert dataset.train is train and dataset.test is test
    assert dataset.num_classes == 3


def test_is_frozen():
    dataset = Dataset(some(), some(), 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.num_classes = 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.train.labels = None


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(images=np.zeros((6, 4, 5, 3), np.float32)), "got float32"),
        (dict(images=np.zeros((6, 4, 5), np.uint8)), r"got uint8 \[6, 4, 5\]"),
        (dict(images=np.zeros((0, 4, 5, 3), np.uint8)), "not empty"),
        (dict(images=np.zeros((6, 4, 0, 3), np.uint8)), "not empty"),
        (dict(images=np.zeros((7, 4, 5, 3), np.uint8)), r"int32 \[7\], one per image"),
        (dict(labels=np.zeros(6, np.int64)), "got int64"),
        (dict(labels=np.zeros((6, 1), np.int32)), r"got int32 \[6, 1\]"),
        (dict(labels=np.full(6, 3, np.int32)), r"in 0\.\.2, got 3\.\.3"),
        (dict(labels=np.full(6, -1, np.int32)), r"in 0\.\.2, got -1\.\.-1"),
    ],
)
def test_refuses(part, change, message):
    parts = {"train": some(), "test": some()}
    parts[part] = dataclasses.replace(parts[part], **change)
    with pytest.raises(ValueError, match=f"`{part}` must be .*{message}"):
        Dataset(**parts, num_classes=3)


def test_refuses_images_of_two_shapes():
    with pytest.raises(ValueError, match=r"got \[4, 5, 3\] and \[5, 4, 3\]"):
        Dataset(some(), some(shape=(5, 4, 3)), num_classes=3)


@pytest.mark.parametrize("count", [0, -1, 2.5, True, None])
def test_refuses_a_number_of_classes(count):
    with pytest.raises(ValueError, match="`num_classes` must be a positive int"):
        Dataset(some(), some(), num_classes=count)


def test_a_data_error_is_a_value_error():
    assert issubclass(DataError, ValueError)
