"""CIFAR-10 from the official files, checked; nothing is downloaded or unpacked."""

import gzip
import hashlib
import io
import os
import pathlib
import pickle
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from train.data.arrays import DataError, Dataset, Images


HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
ACCEPT = "--data.accept-other-files"

NUM_TRAIN = 50_000
RECORDS = 10_000  # per file
PIXELS = 3 * 32 * 32
NUM_CLASSES = 10

# What the official archives, and the files inside them, add up to.
MD5 = {
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-batches-bin/data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "cifar-10-batches-bin/data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "cifar-10-batches-bin/data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "cifar-10-batches-bin/data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "cifar-10-batches-bin/data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "cifar-10-batches-bin/test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-10-batches-py/data_batch_1": "c99cafc152244af753f735de768cd75f",
    "cifar-10-batches-py/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "cifar-10-batches-py/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "cifar-10-batches-py/data_batch_4": "634d18415352ddfa80567beed471001a",
    "cifar-10-batches-py/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "cifar-10-batches-py/test_batch": "40351d587109b95175f43aff81a1287e",
}


class Form(NamedTuple):
    """One of the two forms in which CIFAR-10 is handed out.

    Attributes:
      folder: the name of the folder with the files.
      archive: the name of the archive with the folder.
      names: the names of the files, the test file last.
      sizes: the sizes a file may have, in bytes.
      decode: a file's bytes -> (pixels, uint8 [N, 3072], channel by channel; labels [N]).
      checked_only: whether a file whose checksum differs must not be decoded.
    """

    folder: str
    archive: str
    names: tuple[str, ...]
    sizes: range
    decode: Callable[[bytes], tuple[Any, Any]]
    checked_only: bool


class File(NamedTuple):
    """A file as read: its name, where it is (for messages), and its bytes."""

    name: str
    place: str
    data: bytes


def load(folder: str | os.PathLike[str], accept_other_files: bool = False) -> Dataset:
    """Reads CIFAR-10: 50,000 + 10,000 images of 32 x 32 x 3 in 10 classes.

    The files are the official ones, in the binary or the Python form, unpacked or as the
    archive; sizes, labels and checksums are checked. Pickles of the Python form are
    unpickled only if their checksum is right, whatever the options.

    Args:
      folder: one of
        - the folder `cifar-10-batches-bin` or `cifar-10-batches-py`;
        - the archive `cifar-10-binary.tar.gz` or `cifar-10-python.tar.gz`, which is read
          in place;
        - a folder with one of these inside; of several, folders come before archives,
          and of two the binary one comes first.
      accept_other_files: whether binary files and archives may differ from the official
        ones. Sizes and labels must be right all the same.

    Returns:
      The images in the order of the files; images uint8 [N, 32, 32, 3].

    Raises:
      DataError: files that are missing, damaged, or not the official ones.

    >>> load("no/such/folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    train.data.arrays.DataError: no/such/folder does not exist; CIFAR-10 would be ...
    """
    try:
        form, path = _find(pathlib.Path(os.path.expanduser(folder)))
        if path.is_file():
            files = _read_archive(path, form, accept_other_files)
        else:
            files = _read_folder(path, form)
        return _gather(files, form, accept_other_files)
    except OSError as error:
        raise DataError(f"CIFAR-10 cannot be read: {error}") from error


def _find(path: pathlib.Path) -> tuple[Form, pathlib.Path]:
    """The form of the data under a path, and their folder or archive."""
    if path.is_dir():
        for form in FORMS:
            if any((path / name).exists() for name in form.names):
                return form, path
        for form in FORMS:
            if (path / form.folder).is_dir():
                return form, path / form.folder
        for form in FORMS:
            if (path / form.archive).is_file():
                return form, path / form.archive
        found = "holds no CIFAR-10"
    elif path.exists():
        for form in FORMS:
            if path.name == form.archive:
                return form, path
        found = "is no folder, and no archive by its name"
    else:
        found = "does not exist"
    places = [form.folder for form in FORMS] + [form.archive for form in FORMS]
    raise DataError(
        f"{path} {found}; CIFAR-10 would be {', '.join(places[:-1])} or {places[-1]}, or "
        f"a folder with one of them inside (from {HOME})"
    )


def _read_folder(folder: pathlib.Path, form: Form) -> Iterator[File]:
    """The six files of a folder, one after another."""
    for name in form.names:
        path = folder / name
        if not path.is_file():
            raise DataError(
                f"{path} is missing; {form.folder} has the files {', '.join(form.names)}"
            )
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            yield File(name, str(path), _read(stream, str(path), size, form))


def _read_archive(path: pathlib.Path, form: Form, accept: bool) -> Iterator[File]:
    """The six files of an archive in the archive's order, and then its checksum."""
    wanted = {f"{form.folder}/{name}": name for name in form.names}
    missing = dict(wanted)
    with open(path, "rb") as file:
        hashed = _Hashed(file)
        try:
            with (
                gzip.GzipFile(fileobj=io.BufferedReader(hashed, 2**20)) as unzipped,
                tarfile.open(fileobj=unzipped, mode="r|", bufsize=2**20) as archive,
            ):
                for member in archive:
                    stream = archive.extractfile(member) if member.isreg() else None
                    if stream is None or member.name not in wanted:
                        continue
                    place = f"{member.name} in {path}"
                    data = _read(stream, place, member.size, form)
                    yield File(wanted[member.name], place, data)
                    missing.pop(member.name, None)
                while unzipped.read(2**20):
                    pass
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            raise DataError(
                f"{path} is damaged, or no .tar.gz archive ({error}); the official "
                f"{form.archive} is at {HOME}"
            ) from error
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(missing)}; the official {form.archive} is at {HOME}"
        )
    if not accept:
        _check_md5(str(path), form.archive, hashed.md5.hexdigest(), _differs())


def _read(stream: Any, place: str, size: int, form: Form) -> bytes:
    """A file's bytes, if they are as many as they should be."""
    _check_size(place, size, form)
    data = stream.read(size)
    _check_size(place, len(data), form)
    return data


def _gather(files: Iterator[File], form: Form, accept: bool) -> Dataset:
    """Decodes the files into one array, whatever order they come in."""
    count = RECORDS * len(form.names)
    images = np.empty((count, 32, 32, 3), np.uint8)
    labels = np.empty(count, np.int32)
    for file in files:
        if form.checked_only or not accept:
            _check_file(file, form)
        pixels, classes = form.decode(file.data)
        if classes.max() >= NUM_CLASSES:
            raise DataError(
                f"{file.place} has a label {classes.max()}; those of CIFAR-10 are 0..9"
            )
        start = form.names.index(file.name) * RECORDS
        planes = pixels.reshape(RECORDS, 3, 32, 32)
        images[start : start + RECORDS] = planes.transpose(0, 2, 3, 1)
        labels[start : start + RECORDS] = classes
    return Dataset(
        train=Images(images[:NUM_TRAIN], labels[:NUM_TRAIN]),
        test=Images(images[NUM_TRAIN:], labels[NUM_TRAIN:]),
        num_classes=NUM_CLASSES,
    )


def _decode_binary(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    records = np.frombuffer(data, np.uint8).reshape(RECORDS, 1 + PIXELS)
    return records[:, 1:], records[:, 0]


def _decode_pickle(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    with warnings.catch_warnings():
        # NumPy 2.4.0 to 2.4.4 warn of pickles as old as these.
        warnings.simplefilter("ignore")
        batch = pickle.loads(data, encoding="bytes")
    return batch[b"data"], np.array(batch[b"labels"])


def _check_size(place: str, size: int, form: Form) -> None:
    if size in form.sizes:
        return
    right = f"{form.sizes[0]:,}" if len(form.sizes) == 1 else f"at most {form.sizes[-1]:,}"
    wrong = "too long" if size > form.sizes[-1] else "truncated"
    raise DataError(f"{place} is {wrong}: {size:,} bytes instead of {right}")


def _check_file(file: File, form: Form) -> None:
    md5 = hashlib.md5(file.data, usedforsecurity=False).hexdigest()
    advice = _differs()
    if form.checked_only:
        advice = (
            "unpickling another file could run any code, so it is never done; use the "
            f"official file or the binary version, {BINARY.archive}, from {HOME}"
        )
    _check_md5(file.place, f"{form.folder}/{file.name}", md5, advice)


def _differs() -> str:
    return f"use the official file from {HOME}, or pass {ACCEPT} to use this one"


def _check_md5(place: str, key: str, md5: str, advice: str) -> None:
    if md5 != MD5[key]:
        raise DataError(
            f"{place} has the MD5 sum {md5}, the official file has {MD5[key]}; {advice}"
        )


class _Hashed(io.RawIOBase):
    """A file that sums up what is read from it."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.md5 = hashlib.md5(usedforsecurity=False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        self.md5.update(data)
        buffer[: len(data)] = data
        return len(data)


BINARY = Form(
    folder="cifar-10-batches-bin",
    archive="cifar-10-binary.tar.gz",
    names=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    sizes=range(RECORDS * (1 + PIXELS), RECORDS * (1 + PIXELS) + 1),
    decode=_decode_binary,
    checked_only=False,
)
PYTHON = Form(
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    names=(*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    # A pickle's size says little; the limit keeps what is no batch out of memory.
    sizes=range(40_000_001),
    decode=_decode_pickle,
    checked_only=True,
)
FORMS = (BINARY, PYTHON)
