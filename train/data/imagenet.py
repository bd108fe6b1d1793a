"""ImageNet, or any images in a folder per class; they stay in their files."""

import dataclasses
import hashlib
import os
import pathlib

import numpy as np

from train.data import decode
from train.data.arrays import DataError, Images
from train.data.decode import SUFFIXES


NAMED = 5  # classes named in a message, at most


@dataclasses.dataclass(frozen=True)
class Files:
    """Images in files, and their labels.

    Attributes:
      folder: the folder with a folder per class.
      classes: the classes' folders; labels count them.
      names: of the files, as bytes [N].
      labels: int32 [N].
    """

    folder: str
    classes: tuple[str, ...]
    names: np.ndarray
    labels: np.ndarray

    def path(self, row: int) -> str:
        """Where an image is."""
        name = os.fsdecode(self.names[row])
        return os.path.join(self.folder, self.classes[self.labels[row]], name)


def some(files: Files, count: int, seed: int, size: int) -> Images:
    """Images drawn at random, in the host's memory; what cannot be read is left out.

    Raises:
      DataError: none of them can be read.
    """
    pixels, labels = [], []
    for row in np.random.default_rng(seed).permutation(len(files.labels)):
        if len(labels) == count:
            break
        try:
            pixels.append(decode.read(files.path(row), size, decode.center_box))
        except Exception:  # Pillow raises all kinds
            continue
        labels.append(files.labels[row])
    if not labels:
        raise DataError(f"no image in {files.folder} can be read")
    return Images(np.stack(pixels), np.array(labels, np.int32))


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """What to train on and what to test with, as files of images of any size.

    Attributes:
      train, test: the files, class by class in alphabetical order.
      image_size: side of the square that a network sees of an image.
    """

    train: Files
    test: Files
    image_size: int

    @property
    def num_classes(self) -> int:
        """Labels are 0 to num_classes - 1."""
        return len(self.train.classes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Of what is read: [H, W, C]."""
        return self.image_size, self.image_size, 3

    def digest(self) -> str:
        """Differs between folders of different files; their contents do not matter."""
        whole = hashlib.sha256()
        for part in (self.train, self.test):
            whole.update("/".join(part.classes).encode(errors="surrogateescape"))
            whole.update(part.names.tobytes() + part.labels.tobytes())
        return whole.hexdigest()


def load(folder: str | os.PathLike[str], image_size: int = 224) -> ImageFolder:
    """Finds the images in FOLDER/train/CLASS/ and FOLDER/val/CLASS/.

    The classes are the names of the folders, in alphabetical order. Images are files whose
    names end with .jpeg, .jpg, .png, .bmp or .webp in any case; other files are passed
    over. No image is opened.

    Args:
      folder: the folder with `train` and `val` in it.
      image_size: side of the square that a network sees.

    Raises:
      DataError: no such folders, a class without images, or other classes in `val` than in
        `train`.

    >>> load("no/such/folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    train.data.arrays.DataError: no/such/folder does not exist; ImageNet would be a ...
    """
    top = pathlib.Path(os.path.expanduser(folder))
    if not top.is_dir():
        wrong = "is not a folder" if top.exists() else "does not exist"
        raise DataError(
            f"{top} {wrong}; ImageNet would be a folder with train/CLASS/*.JPEG and "
            "val/CLASS/*.JPEG in it"
        )
    try:
        train, test = _find(top / "train"), _find(top / "val")
    except OSError as error:
        raise DataError(f"ImageNet cannot be read: {error}") from error
    for name, other in (("train", "val"), ("val", "train")):
        one, two = (train, test) if name == "train" else (test, train)
        if missing := sorted(set(one.classes) - set(two.classes)):
            raise DataError(
                f"{top}: train and val must have the same classes, but {_some(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} in {name} and not in {other}"
            )
    return ImageFolder(train, test, image_size)


def _find(folder: pathlib.Path) -> Files:
    """The images in the class folders of a folder."""
    if not folder.is_dir():
        raise DataError(f"{folder} is missing; it would hold a folder of images per class")
    with os.scandir(folder) as entries:
        entries = list(entries)
    classes = sorted(entry.name for entry in entries if entry.is_dir())
    if not classes:
        loose = sum(_is_image(entry) for entry in entries)
        raise DataError(
            f"{folder} must hold a folder per class, got none"
            + (f", but {loose} images; move them into class folders" if loose else "")
        )
    names: list[bytes] = []
    counts = []
    for name in classes:
        with os.scandir(folder / name) as entries:
            found = sorted(os.fsencode(entry.name) for entry in entries if _is_image(entry))
        names += found
        counts.append(len(found))
    if empty := [name for name, count in zip(classes, counts) if not count]:
        raise DataError(f"{folder}: there is no image in {_some(empty)}")
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
    return Files(str(folder), tuple(classes), np.array(names), labels)


def _is_image(entry: os.DirEntry) -> bool:
    name = entry.name.lower()
    return name.endswith(SUFFIXES) and not name.startswith(".") and not entry.is_dir()


def _some(names: list[str]) -> str:
    """The names, or the first of them.

    >>> _some(["a", "b"]), _some(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
