"""ImageNet, or any images in one folder per class, which stay in their files until read."""

import dataclasses
import hashlib
import itertools
import math
import os
import pathlib
from collections.abc import Callable

import numpy as np
from PIL import Image

from train.data.arrays import DataError, Images


FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")

AREA = (0.08, 1.0)  # as a share of the image
RATIO = (3 / 4, 4 / 3)  # width / height
ATTEMPTS = 10

SHORTER_SIDE = 256 / 224  # of a test image, in sizes of the crop

# JPEGs are decoded at 1/2, 1/4 or 1/8 of their size if that leaves this many pixels per
# pixel of the result, along each axis. The result then differs by less than one gray level
# (root mean square); with 1 it would be two or three.
SPARE = 2

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


@dataclasses.dataclass(frozen=True)
class Files:
    """Image files and their labels.

    Attributes:
      folder: the folder that holds one folder per class.
      classes: the names of the class folders; a label is an index of this tuple.
      names: the names of the files, as bytes [N].
      labels: int32 [N].
    """

    folder: str
    classes: tuple[str, ...]
    names: np.ndarray
    labels: np.ndarray

    def path(self, row: int) -> str:
        """The path of an image."""
        name = os.fsdecode(self.names[row])
        return os.path.join(self.folder, self.classes[self.labels[row]], name)


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """Images for training and for testing, as files of any size.

    Attributes:
      train, test: the files, class by class in alphabetical order.
      image_size: side of the square crop that a network sees.
    """

    train: Files
    test: Files
    image_size: int

    @property
    def num_classes(self) -> int:
        """The number of classes: labels are 0 to num_classes - 1."""
        return len(self.train.classes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of an image after reading: [H, W, C]."""
        return self.image_size, self.image_size, 3

    def digest(self) -> str:
        """A hash of the names of all files, but not of their contents."""
        whole = hashlib.sha256()
        for part in (self.train, self.test):
            whole.update("/".join(part.classes).encode(errors="surrogateescape"))
            whole.update(part.names.tobytes() + part.labels.tobytes())
        return whole.hexdigest()


def load(folder: str | os.PathLike[str], image_size: int = 224) -> ImageFolder:
    """Finds the images in FOLDER/train/CLASS/ and FOLDER/val/CLASS/.

    The classes are the names of the folders, in alphabetical order. Images are files whose
    names end with .jpeg, .jpg, .png, .bmp or .webp in any case. Other files are ignored, as
    are hidden files and folders. No image is opened.

    Raises:
      DataError: folders are missing, a class has no images, or `train` and `val` have
        different classes.

    >>> load("no/such/folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    train.data.arrays.DataError: no/such/folder does not exist; ImageNet must be a ...
    """
    top = pathlib.Path(os.path.expanduser(folder))
    if not top.is_dir():
        wrong = "is not a folder" if top.exists() else "does not exist"
        raise DataError(
            f"{top} {wrong}; ImageNet must be a folder with train/CLASS/*.JPEG and "
            "val/CLASS/*.JPEG"
        )
    try:
        train, test = _find(top / "train"), _find(top / "val")
    except OSError as error:
        raise DataError(f"ImageNet cannot be read: {error}") from error
    for one, two, where in ((train, test, "train"), (test, train, "val")):
        if missing := sorted(set(one.classes) - set(two.classes)):
            raise DataError(
                f"{top}: train and val must have the same classes, but {len(missing)} of "
                f"them are only in {where}: {', '.join(missing[:5])}"
            )
    return ImageFolder(train, test, image_size)


def _find(folder: pathlib.Path) -> Files:
    """Finds the images in the class folders of a folder."""
    if not folder.is_dir():
        raise DataError(f"{folder} is missing; it must hold one folder of images per class")
    entries = _entries(folder)
    classes = sorted(entry.name for entry in entries if entry.is_dir())
    if not classes:
        loose = sum(map(_is_image, entries))
        raise DataError(
            f"{folder} must hold one folder per class, got none"
            + (f", but {loose} images; move them into class folders" if loose else "")
        )
    names = [
        sorted(os.fsencode(x.name) for x in _entries(folder / name) if _is_image(x))
        for name in classes
    ]
    if empty := [name for name, found in zip(classes, names) if not found]:
        named = ", ".join(f"{name}/" for name in empty[:5])
        raise DataError(f"{folder} must have images in each class, but none is in {named}")
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), list(map(len, names)))
    every = np.array(list(itertools.chain.from_iterable(names)))
    return Files(str(folder), tuple(classes), every, labels)


def _entries(folder: pathlib.Path) -> list[os.DirEntry]:
    """The files and folders in a folder, without hidden ones, which tools leave there."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is_image(entry: os.DirEntry) -> bool:
    if not entry.name.lower().endswith(SUFFIXES):
        return False
    return entry.is_file() or entry.is_symlink()  # reading a FIFO would block


def some(files: Files, count: int, seed: int, size: int) -> Images:
    """Reads random images into host memory and skips unreadable ones.

    Raises:
      DataError: no image can be read.
    """
    pixels, labels = [], []
    for row in np.random.default_rng(seed).permutation(len(files.labels)):
        if len(labels) == count:
            break
        try:
            pixels.append(read(files.path(row), size, center_box))
        except Exception:  # Pillow raises many types
            continue
        labels.append(files.labels[row])
    if not labels:
        raise DataError(f"no image in {files.folder} can be read")
    return Images(np.stack(pixels), np.array(labels, np.int32))


# From a file to pixels


def read(path: str, size: int, box_of: Callable[[int, int], Box]) -> np.ndarray:
    """Reads a part of an image as RGB, scaled to size x size with antialiasing.

    Gray, CMYK and palette images are converted. Transparency and the orientation tag of a
    camera are ignored. Large JPEGs are decoded at a fraction of their size, with at least
    two pixels per axis for each pixel of the result.

    Args:
      path: a JPEG, PNG, BMP or WebP file with any name.
      size: side of the result.
      box_of: returns the part to take, from the (width, height) of the image.

    Returns:
      uint8 [size, size, 3].

    Raises:
      OSError, SyntaxError, ValueError, …: not an image, or a truncated one.
    """
    with Image.open(path, formats=FORMATS) as image:
        width, height = image.size
        left, top, right, bottom = box_of(width, height)
        spare = SPARE * size / min(right - left, bottom - top)
        image.draft(None, (math.ceil(width * spare), math.ceil(height * spare)))
        across, down = image.width / width, image.height / height
        box = (left * across, top * down, right * across, bottom * down)
        part = _rgb(image).resize((size, size), Image.Resampling.BILINEAR, box)
    return np.asarray(part)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I;16":  # Pillow would clip 16-bit values instead of scaling them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA")  # a palette may hold transparent colors
    return image if image.mode == "RGB" else image.convert("RGB")


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """A random crop for training: area 8 to 100 %, shape 3:4 to 4:3, in whole pixels.

    As in Szegedy et al., CVPR 2015. If ten attempts do not fit into the image, the result
    is the largest part in the middle with an allowed shape.

    >>> random_box(500, 375, np.random.default_rng(0))
    (65, 166, 194, 337)
    """
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(*AREA)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers((width - w, height - h), endpoint=True).tolist()
            return left, top, left + w, top + h
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def center_box(width: int, height: int) -> Box:
    """The crop for testing: the middle square, 224/256 of the shorter side.

    >>> center_box(512, 256)
    (144.0, 16.0, 368.0, 240.0)
    """
    side = min(width, height) / SHORTER_SIDE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
