"""Inputs and labels of the user, from an .npz file or a pair of .npy files."""

import itertools
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from train.data.arrays import DataError, Dataset, Images


SEED = 0
HELD_OUT = 10  # one of so many examples is for testing
MOST_CLASSES = 2**16
# Names of inputs and labels in an .npz file, in pairs: of all examples, or of a part.
OF_ALL = ("x", "y"), ("inputs", "labels"), ("images", "labels"), ("X", "y")
OF_PARTS = ("x_train", "y_train", "x_test", "y_test")
EXPECTED = (
    "an .npz file with x_train, y_train, x_test and y_test, or with x and y (or inputs and "
    "labels), or two .npy files: inputs, then labels"
)


def load(files: Sequence[str]) -> Dataset:
    """Reads inputs [N, ...] and labels [N] from files of NumPy.

    uint8 inputs are images and stay as they are; all others become float32. Images without
    channels, uint8 [N, H, W], get one. Labels are whole numbers from 0 on. Without arrays
    for testing, a tenth of the examples is held out: the last ones in the order of
    `numpy.random.RandomState(0).permutation(N)`.

    Args:
      files: an .npz file with x_train, y_train, x_test and y_test, or with x and y (or
        inputs and labels); or two .npy files, inputs and labels.

    Raises:
      DataError: files are missing, or hold something else. It names the file.
    """
    arrays = _read(files)
    where = " and ".join(files)
    if len(arrays) == 4:
        x, y, test_x, test_y = arrays
        parts = [_images(x, y, where), _images(test_x, test_y, where)]
        if parts[0].images.shape[1:] != parts[1].images.shape[1:]:
            raise DataError(
                f"{where}: x_train and x_test must have inputs of one shape, got "
                f"{list(x.shape)} and {list(test_x.shape)}"
            )
        if parts[0].images.dtype != parts[1].images.dtype:
            raise DataError(
                f"{where}: x_train and x_test must have one type, got {x.dtype} and "
                f"{test_x.dtype}"
            )
    else:
        x, y = arrays
        parts = list(_split(_images(x, y, where)))
    num_classes = 1 + max(int(part.labels.max()) for part in parts)
    if num_classes < 2:
        raise DataError(f"{where} must have at least two classes to tell apart, got one")
    return Dataset(*parts, num_classes=num_classes)


def _read(files: Sequence[str]) -> list[np.ndarray]:
    """The arrays: inputs and labels, of all examples or of both parts."""
    paths = [pathlib.Path(file).expanduser() for file in files]
    kinds = [path.suffix for path in paths]
    if kinds not in ([".npz"], [".npy", ".npy"]):
        raise DataError(f"`data.arrays` must name {EXPECTED}, got {' '.join(files)}")
    return list(itertools.chain.from_iterable(map(_read_one, paths)))


def _read_one(path: pathlib.Path) -> list[np.ndarray]:
    """The arrays of a file, which are two or four of an .npz and one of an .npy."""
    try:
        with open(path, "rb") as file:
            found = np.load(file, allow_pickle=False)
            return _alone(found, path) if path.suffix == ".npy" else _chosen(found, path)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is no file of numeric arrays: {error}") from error


def _alone(found: Any, path: pathlib.Path) -> list[np.ndarray]:
    """The only array."""
    if not isinstance(found, np.ndarray):
        raise DataError(f"{path} is no .npy file, but holds several arrays")
    return [found]


def _chosen(found: Any, path: pathlib.Path) -> list[np.ndarray]:
    """The arrays with known names."""
    if isinstance(found, np.ndarray):
        raise DataError(f"{path} is no .npz file, but a single array")
    for names in (OF_PARTS, *OF_ALL):
        if set(names) <= set(found):
            return [found[name] for name in names]
    held = ", ".join(found) or "nothing"
    raise DataError(f"{path} must be {EXPECTED}; it holds {held}")


def _images(x: np.ndarray, y: np.ndarray, where: str) -> Images:
    """Inputs and labels, checked."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or x.ndim < 2 or not x.size or len(x) != len(y):
        raise DataError(
            f"{where} must hold inputs [N, ...] and labels [N], got the shapes "
            f"{list(x.shape)} and {list(y.shape)}"
        )
    if x.dtype.kind not in "buif":
        raise DataError(f"{where}: inputs must be numbers, got {x.dtype}")
    if y.dtype.kind not in "buif" or (y != np.floor(y)).any():
        raise DataError(f"{where}: labels must be whole numbers, got {y.dtype}")
    if y.min() < 0 or y.max() >= MOST_CLASSES:
        raise DataError(
            f"{where}: labels must be from 0 to the number of classes - 1, got {y.min()} "
            f"to {y.max()}"
        )
    if x.dtype == np.uint8:
        images = x[..., None] if x.ndim == 3 else x
    else:
        with np.errstate(over="ignore"):
            images = x.astype(np.float32)
        if not np.isfinite(images).all():
            raise DataError(f"{where}: inputs must be finite in float32")
    return Images(images, y.astype(np.int32))


def _split(every: Images) -> Iterator[Images]:
    """All examples but a tenth, and this tenth."""
    count = len(every.labels)
    held_out = max(1, count // HELD_OUT)
    if count < 2:
        raise DataError(f"at least two examples are needed, got {count}")
    # NumPy guarantees that the stream of RandomState never changes; Generator may change.
    order = np.random.RandomState(SEED).permutation(count)
    for rows in np.split(order, [count - held_out]):
        yield Images(every.images[rows], every.labels[rows])
