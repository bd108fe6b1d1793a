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
    assert dataset.num_classes == 10 and len(dataset.test.labels) == RECORDS
    assert len(dataset.train.labels) == 5 * RECORDS
    rows = 0
    for seed in range(6):
        part, rows = (dataset.train, rows) if seed < 5 else (dataset.test, 0)
        labels, pixels = batch(seed)
        got = part.images[rows : rows + RECORDS]
        assert part.images.dtype == np.uint8 and part.labels.dtype == np.int32
        np.testing.assert_array_equal(part.labels[rows : rows + RECORDS], labels)
        for channel in range(3):
            plane = pixels[:, channel * 1024 : (channel + 1) * 1024]
            np.testing.assert_array_equal(got[..., channel], plane.reshape(-1, 32, 32))
        rows += RECORDS


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


def other(folder, data):
    (folder / "data_batch_2.bin").write_bytes(data)


def no_file(make):
    """Replaces a file by something else."""

    def change(folder):
        (folder / "data_batch_2.bin").unlink()
        make(folder / "data_batch_2.bin")

    return change


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize(
    "change, message",
    [
        (no_file(lambda path: None), "data_batch_2.bin is missing; unpack"),
        (no_file(os.mkdir), "data_batch_2.bin is missing; unpack"),
        (no_file(os.mkfifo), "data_batch_2.bin is missing; unpack"),
        (lambda d: other(d, b""), f"has 0 bytes instead of {SIZE:,}; unpack"),
        (lambda d: other(d, bytes(SIZE + 1)), f"has {SIZE + 1:,} bytes instead"),
        (
            lambda d: other(d, b"\xff" * SIZE),
            {False: "has the MD5 sum", True: "has a label 255; labels of CIFAR-10 are"},
        ),
    ],
)
def test_wrong_files_are_refused(folder, change, message, accept):
    change(folder)
    with pytest.raises(DataError) as caught:
        cifar10.load(folder, accept)
    said = str(caught.value)
    assert str(folder / "data_batch_2.bin") in said and "\n" not in said
    assert (message[accept] if isinstance(message, dict) else message) in said


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
