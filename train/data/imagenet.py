"""ImageNet, or any images in one folder per class, which stay in their files until read."""

import collections
import dataclasses
import hashlib
import io
import itertools
import math
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from PIL import ExifTags, Image

from train.data.arrays import DataError, Images
from train.process.messages import counted


FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF")
KINDS = "JPEG, PNG, BMP, WebP, GIF or TIFF"
SUFFIXES = (
    *(".jpeg", ".jpg", ".jpe", ".jfif"),
    *(".png", ".bmp", ".webp", ".gif", ".tiff", ".tif"),
)
MOST_NAMED = 5  # files in a message

AREA = (0.08, 1.0)  # as a share of the image
RATIO = (3 / 4, 4 / 3)  # width / height
ATTEMPTS = 10

SHORTER_SIDE = 256 / 224  # of a test image, in sizes of the crop

# JPEGs are decoded at 1/2, 1/4 or 1/8 of their size if that leaves this many pixels per
# pixel of the result, along each axis. The result then differs by less than one gray level
# (root mean square); with 1 it would be two or three.
SPARE = 2

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

# Seconds before each further attempt to read a file: a network file system may be away for
# a minute. A file that is missing from a folder that is there gets a single one.
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

# How to turn an image upright, by the orientation that a camera has noted.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)


@dataclasses.dataclass(frozen=True)
class Files:
    """Image files and their labels.

    Attributes:
      folder: the folder that holds one folder per class.
      classes: the names of the class folders; a label is an index of this tuple.
      names: the names of the files, as bytes [N].
      labels: int32 [N].
      left_out: the files and folders in the class folders that are no images, by path.
    """

    folder: str
    classes: tuple[str, ...]
    names: np.ndarray
    labels: np.ndarray
    left_out: tuple[str, ...] = ()

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

    @property
    def dtype(self) -> np.dtype:
        """The type of an image after reading."""
        return np.dtype(np.uint8)

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
    names end with .jpeg, .jpg, .jpe, .jfif, .png, .bmp, .webp, .gif, .tiff or .tif in any
    case. Other files and nested folders are left out, see `left_out`. Hidden files and
    folders are ignored. No image is opened.

    Raises:
      DataError: folders are missing, there are fewer than two classes, a class has no
        images, or `train` and `val` have different classes.

    >>> load("no/such/folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    train.data.arrays.DataError: no/such/folder does not exist; images must be in a ...
    """
    # Pillow's warnings name no file, and an image that it cannot read is reported anyway.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    top = pathlib.Path(os.path.expanduser(folder))
    if not top.is_dir():
        wrong = "is not a folder" if top.exists() else "does not exist"
        raise DataError(
            f"{top} {wrong}; images must be in a folder with train/CLASS/*.JPEG and "
            "val/CLASS/*.JPEG, or other kinds of images"
        )
    try:
        train = _find(top / "train")
        test = _find(top / "val")
    except OSError as error:
        raise DataError(f"the images of {top} cannot be read: {error}") from error
    for one, two, where in ((train, test, "train"), (test, train, "val")):
        missing = sorted(set(one.classes) - set(two.classes))
        if missing:
            raise DataError(
                f"{top}: train and val must have the same classes, but {len(missing)} of "
                f"them are only in {where}: {', '.join(missing[:5])}"
            )
    if len(train.classes) < 2:
        raise DataError(
            f"{top} must have at least two classes to tell apart, a folder for each, got "
            f"only {train.classes[0]}"
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
            + (f", but {counted(loose, 'image')}; use class folders" if loose else "")
        )
    names: list[list[bytes]] = []
    left_out: list[str] = []
    for name in classes:
        inside = _entries(folder / name)
        names.append(sorted(os.fsencode(x.name) for x in inside if _is_image(x)))
        left_out += sorted(x.path for x in inside if not _is_image(x))
    empty = [name for name, found in zip(classes, names) if not found]
    if empty:
        named = ", ".join(f"{name}/" for name in empty[:MOST_NAMED])
        raise DataError(
            f"{folder} must have images in each class, but none is in {named}"
            + (f"; {describe_left_out(left_out)}" if left_out else "")
        )
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), list(map(len, names)))
    every = np.array(list(itertools.chain.from_iterable(names)))
    return Files(str(folder), tuple(classes), every, labels, tuple(left_out))


def describe_left_out(paths: Sequence[str]) -> str:
    """Counts the files and folders that are no images, by kind, and names the first ones.

    >>> describe_left_out(["ant/a.txt", "b/c.TXT"])
    'left out, because they are no images: 2 .txt (ant/a.txt, b/c.TXT)'
    """
    suffixes = (pathlib.PurePath(path).suffix.lower() for path in paths)
    kinds = collections.Counter(suffix or "without a suffix" for suffix in suffixes)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(MOST_NAMED))
    named = ", ".join(paths[:MOST_NAMED])
    more = ", …" if len(paths) > MOST_NAMED else ""
    return f"left out, because they are no images: {counted} ({named}{more})"


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
    pixels = []
    labels = []
    waits = iter(WAITS)

    def pause(seconds: float, error: OSError) -> None:
        del error
        time.sleep(seconds)

    for row in np.random.default_rng(seed).permutation(len(files.labels)):
        if len(labels) == count:
            break
        try:
            found = patiently(files.path(row), size, center_box, waits, pause)
        except Exception:  # Pillow raises many types
            continue
        pixels.append(found)
        labels.append(files.labels[row])
    if not labels:
        raise DataError(f"no image in {files.folder} can be read")
    return Images(np.stack(pixels), np.array(labels, np.int32))


# From a file to pixels


def patiently(
    path: str,
    size: int,
    box_of: Callable[[int, int], Box],
    waits: Iterator[float],
    pause: Callable[[float, OSError], object],
) -> np.ndarray:
    """Like `read`, but tries again while the system cannot give the file.

    Args:
      path, size, box_of: see `read`.
      waits: the seconds before each further attempt.
      pause: waits; it is called with these seconds and the error.

    Raises:
      OSError, SyntaxError, ValueError, …: see `read`.
    """
    attempt = 0
    while True:
        try:
            return read(path, size, box_of)
        except OSError as error:
            if not is_of_the_system(error) or (attempt and _is_missing(path)):
                raise
            seconds = next(waits, None)
            if seconds is None:
                raise
            attempt += 1
            pause(seconds, error)


def is_of_the_system(error: BaseException) -> bool:
    """Whether a file could not be read; otherwise its content is no image.

    Content is decoded in memory, where no error has a number.
    """
    return isinstance(error, OSError) and error.errno is not None


def _is_missing(path: str) -> bool:
    """Whether the folder of a file is there, and the file is not."""
    return os.path.isdir(os.path.dirname(path)) and not os.path.exists(path)


def read(path: str, size: int, box_of: Callable[[int, int], Box]) -> np.ndarray:
    """Reads a part of an image as RGB, scaled to size x size with antialiasing.

    Images are turned upright by the orientation that a camera has noted. Gray, CMYK and
    palette images are converted, and transparency is ignored. Only the first of several
    pictures in a file counts. Large JPEGs are decoded at a fraction of their size, with at
    least two pixels per axis for each pixel of the result.

    Args:
      path: a JPEG, PNG, BMP, WebP, GIF or TIFF file with any name.
      size: side of the result.
      box_of: returns the part to take, from the (width, height) of the upright image.

    Returns:
      uint8 [size, size, 3].

    Raises:
      OSError: the file cannot be read, see `is_of_the_system`.
      OSError, SyntaxError, ValueError, …: not an image, or a truncated one.
    """
    content = io.BytesIO(pathlib.Path(path).read_bytes())
    with Image.open(content, formats=FORMATS) as image:
        orientation = _orientation(image)
        width, height = image.size
        if orientation in SIDEWAYS:
            width, height = height, width
        left, top, right, bottom = box_of(width, height)
        spare = SPARE * size / min(right - left, bottom - top)
        image.draft(None, (math.ceil(image.width * spare), math.ceil(image.height * spare)))
        upright = _rgb(image)
        if orientation in TURNS:
            upright = upright.transpose(TURNS[orientation])
        across = upright.width / width
        down = upright.height / height
        box = (left * across, top * down, right * across, bottom * down)
        part = upright.resize((size, size), Image.Resampling.BILINEAR, box)
    return np.asarray(part)


def _orientation(image: Image.Image) -> int:
    """The orientation that a camera has noted, 1 to 8; 1 if there is none.

    Pillow turns TIFF images itself.
    """
    if image.format == "TIFF":
        return 1
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a damaged note does not make the pixels unreadable
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers, whose range is unknown")
    if image.mode.startswith("I;16"):  # Pillow would clip 16-bit values and not scale them
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
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers((width - w, height - h), endpoint=True).tolist()
            return left, top, left + w, top + h
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    left = (width - w) // 2
    top = (height - h) // 2
    return left, top, left + w, top + h


def center_box(width: int, height: int) -> Box:
    """The crop for testing: the middle square, 224/256 of the shorter side.

    >>> center_box(512, 256)
    (144.0, 16.0, 368.0, 240.0)
    """
    side = min(width, height) / SHORTER_SIDE
    left = (width - side) / 2
    top = (height - side) / 2
    return left, top, left + side, top + side
