"""A dataset refuses arrays that are not what it says they are."""

import dataclasses

import numpy as np
import pytest

from train.data.arrays import Dataset, Images


def some(count=6, shape=(4, 5, 3), classes=3):
    images = np.zeros((count, *shape), np.uint8)
    return Images(images, np.arange(count, dtype=np.int32) % classes)


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(images=np.zeros((6, 4, 5, 3), np.float32)), "got float32"),
        (dict(images=np.zeros((6, 4, 5), np.uint8)), r"got uint8 \[6, 4, 5\]"),
        (dict(images=np.zeros((0, 4, 5, 3), np.uint8)), "not empty"),
        (dict(images=np.zeros((6, 4, 0, 3), np.uint8)), "not empty"),
        (dict(images=np.zeros((7, 4, 5, 3), np.uint8)), r"int32 \[7\], one per image"),
        (dict(images=np.zeros((6, 5, 4, 3), np.uint8)), r"of one shape, got \[[45], "),
        (dict(labels=np.zeros(6, np.int64)), "got int64"),
        (dict(labels=np.zeros((6, 1), np.int32)), r"got int32 \[6, 1\]"),
        (dict(labels=np.full(6, 3, np.int32)), r"in 0\.\.2, got 3\.\.3"),
        (dict(labels=np.full(6, -1, np.int32)), r"in 0\.\.2, got -1\.\.-1"),
    ],
)
def test_refuses(part, change, message):
    parts = {"train": some(), "test": some()}
    assert Dataset(**parts, num_classes=3).image_shape == (4, 5, 3)
    parts[part] = dataclasses.replace(parts[part], **change)
    with pytest.raises(ValueError, match=f"`{part}`.* must be .*{message}"):
        Dataset(**parts, num_classes=3)


@pytest.mark.parametrize("count", [0, -1, 2.5, True, None])
def test_refuses_a_number_of_classes(count):
    with pytest.raises(ValueError, match="`num_classes` must be a positive int"):
        Dataset(some(), some(), num_classes=count)
