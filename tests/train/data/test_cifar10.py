"""CIFAR-10 is read from the official binary files; other files are refused."""

import hashlib
import os

import numpy as np
import pytest

from train.data import cifar10
from train.data.arrays import DataError
from train.data.cifar10 import ARCHIVE, FOLDER, HOME


RECORDS = 100  # per file, a hundredth of the official number
SIZE = RECORDS * 3073


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of made-up files that have the official checksums."""
    made = tmp_path / "data" / FOLDER
    made.mkdir(parents=True)
    sums = {}
    for seed, name in enumerate(cifar10.MD5):
        labels, pixels = batch(seed)
        data = np.concatenate([labels[:, None], pixels], axis=1).tobytes()
        (made / name).write_bytes(data)
        sums[name] = hashlib.md5(data).hexdigest()
    (made / "batches.meta.txt").write_text("airplane\n")
    assert cifar10.RECORDS * 3073 == 30_730_000
    monkeypatch.setattr(cifar10, "MD5", sums)
    monkeypatch.setattr(cifar10, "RECORDS", RECORDS)
    return made


def batch(seed):
    """Labels [N] and pixels [N, 3072]."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=RECORDS, dtype=np.uint8)
    return labels, rng.integers(256, size=(RECORDS, 3072), dtype=np.uint8)


def check(dataset):
    assert dataset.num_classes == 10
    for part, seeds in ((dataset.train, range(5)), (dataset.test, [5])):
        labels, pixels = map(np.concatenate, zip(*map(batch, seeds)))
        assert part.images.dtype == np.uint8 and part.labels.dtype == np.int32
        np.testing.assert_array_equal(part.labels, labels)
        for channel in range(3):
            plane = pixels[:, channel * 1024 : (channel + 1) * 1024].reshape(-1, 32, 32)
            np.testing.assert_array_equal(part.images[..., channel], plane)


def test_the_folder_or_its_parent_is_accepted(folder, monkeypatch):
    check(cifar10.load(folder))
    check(cifar10.load(str(folder.parent)))
    monkeypatch.setenv("HOME", str(folder.parent))
    check(cifar10.load("~"))
    monkeypatch.chdir(folder.rename(folder.parent / "renamed"))
    check(cifar10.load("."))


def test_other_files_are_accepted_with_an_option(folder):
    path = folder / "test_batch.bin"
    data = bytearray(path.read_bytes())
    data[1] ^= 255
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        cifar10.load(folder)
    message = str(caught.value)
    assert message.startswith(f"{path} has the MD5 sum {hashlib.md5(data).hexdigest()}")
    assert cifar10.MD5[path.name] in message and "--data.accept-other-files" in message
    accepted = cifar10.load(folder, accept_other_files=True).test.images
    assert accepted[0, 0, 0, 0] == 255 - batch(5)[1][0, 0]
    path.write_bytes(b"\xff" + data[1:])
    with pytest.raises(DataError, match="has a label 255; labels of CIFAR-10 are"):
        cifar10.load(folder, accept_other_files=True)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "data_batch_2.bin is missing; unpack"),
        (os.mkdir, "data_batch_2.bin is missing; unpack"),
        (os.mkfifo, "data_batch_2.bin is missing; unpack"),
        (lambda path: path.write_bytes(b""), f"has 0 bytes instead of {SIZE:,}; unpack"),
        (lambda path: path.write_bytes(bytes(SIZE + 1)), f"has {SIZE + 1:,} bytes instead"),
    ],
)
def test_wrong_files_are_refused(folder, make, message):
    path = folder / "data_batch_2.bin"
    path.unlink()
    make(path)
    with pytest.raises(DataError) as caught:
        cifar10.load(folder)
    said = str(caught.value)
    assert str(path) in said and "\n" not in said and message in said


def test_missing_data_come_with_instructions(tmp_path):
    (tmp_path / ARCHIVE).write_bytes(b"")
    for path, wrong, where in (
        (tmp_path / "none", "does not exist", tmp_path / "none"),
        (tmp_path, f"holds no folder {FOLDER}", tmp_path),
        (tmp_path / ARCHIVE, "is not a folder", tmp_path),
    ):
        with pytest.raises(DataError) as caught:
            cifar10.load(path)
        assert str(caught.value) == (
            f"{path} {wrong}; download {HOME}/{ARCHIVE}, unpack it with `tar xzf {ARCHIVE} "
            f"-C {where}`, and give the folder {where / FOLDER}"
        )
    with pytest.raises(DataError, match="CIFAR-10 cannot be read: "):
        cifar10.load(tmp_path / ("x" * 5000))
