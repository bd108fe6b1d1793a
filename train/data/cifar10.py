"""Reads CIFAR-10 from the official binary files, which must be downloaded and unpacked."""

import hashlib
import os
import pathlib

import numpy as np

from train.data.arrays import DataError, Dataset, Images


HOME = "https://www.cs.toronto.edu/~kriz"
FOLDER = "cifar-10-batches-bin"
ARCHIVE = "cifar-10-binary.tar.gz"
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
RECORDS = 10_000  # per file
PIXELS = 3 * 32 * 32
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


def load(folder: str | os.PathLike[str], accept_other_files: bool = False) -> Dataset:
    """Reads CIFAR-10: 50,000 + 10,000 images of 32 x 32 x 3 in 10 classes.

    Args:
      folder: the folder `cifar-10-batches-bin`, or its parent.
      accept_other_files: whether the files may differ from the official ones. Their sizes
        and labels are checked nevertheless.

    Returns:
      The images in the order of the files; images uint8 [N, 32, 32, 3].

    Raises:
      DataError: files are missing, damaged, or not the official ones.

    >>> load("no/such/folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    train.data.arrays.DataError: no/such/folder does not exist; download ...
    """
    try:
        found = _find(pathlib.Path(os.path.expanduser(folder)))
        files = [_read(found / name, accept_other_files) for name in MD5]
    except OSError as error:
        raise DataError(f"CIFAR-10 cannot be read: {error}") from error
    images, labels = (np.concatenate(part) for part in zip(*files))
    test = len(labels) - RECORDS
    return Dataset(
        train=Images(images[:test], labels[:test]),
        test=Images(images[test:], labels[test:]),
        num_classes=10,
    )


def _find(path: pathlib.Path) -> pathlib.Path:
    """The folder with the files: `path` itself or a folder inside it."""
    inside = path / FOLDER
    if inside.is_dir():
        return inside
    if any((path / name).exists() for name in MD5):
        return path
    if path.is_dir():
        wrong = f"holds no folder {FOLDER}"
        where = path
    else:
        wrong = "is not a folder" if path.exists() else "does not exist"
        where = path.parent if path.exists() else path
    raise DataError(
        f"{path} {wrong}; download {HOME}/{ARCHIVE}, unpack it with `tar xzf {ARCHIVE} -C "
        f"{where}`, and give the folder {where / FOLDER}"
    )


def _read(path: pathlib.Path, accept_other_files: bool) -> tuple[np.ndarray, np.ndarray]:
    """Reads the images and labels of a file: (uint8 [N, 32, 32, 3], int32 [N])."""
    if not path.is_file():
        raise DataError(f"{path} is missing; unpack {HOME}/{ARCHIVE} again")
    size = path.stat().st_size
    right = RECORDS * (1 + PIXELS)
    if size != right:
        raise DataError(
            f"{path} has {size:,} bytes instead of {right:,}; unpack {HOME}/{ARCHIVE} again"
        )
    data = path.read_bytes()
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if md5 != MD5[path.name] and not accept_other_files:
        raise DataError(
            f"{path} has the MD5 sum {md5}, the official file has {MD5[path.name]}; unpack "
            f"{HOME}/{ARCHIVE} again, or use this file with --data.accept-other-files"
        )
    records = np.frombuffer(data, np.uint8).reshape(RECORDS, 1 + PIXELS)
    most = records[:, 0].max()
    if most >= 10:
        raise DataError(f"{path} has a label {most}; labels of CIFAR-10 are 0..9")
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images.copy(), records[:, 0].astype(np.int32)
