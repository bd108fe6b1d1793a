"""From an image file to the pixels that a network sees: uint8 [size, size, 3].

Both cut a rectangle out and scale it, in one operation:

    training: a random part of random area and shape (Szegedy et al., CVPR 2015);
    testing:  the middle of the image scaled so that its shorter side is 256 for size 224.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image


Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")

AREA = (0.08, 1.0)  # of the image
RATIO = (3 / 4, 4 / 3)  # width / height
ATTEMPTS = 10

SHORTER_SIDE = 256 / 224  # of the image that is tested, in sizes of the crop

# JPEGs are decoded at 1/2, 1/4 or 1/8 of their size as long as this many pixels are left
# for each one wanted, per axis: the result differs by less than one gray level (root mean
# square); with 1 it would be two or three.
SPARE = 2


def read(path: str, size: int, box_of: Callable[[int, int], Box]) -> np.ndarray:
    """Reads a part of an image as RGB, scaled to size x size with antialiasing.

    Gray, CMYK and palette images are converted; transparency is dropped, and so is the
    orientation that a camera noted. Large JPEGs are decoded at a fraction of their size,
    but with at least two pixels per axis for each one wanted.

    Args:
      path: a JPEG, PNG, BMP or WebP file, whatever its name ends with.
      size: of the result.
      box_of: (width, height) of the image -> the part to take.

    Returns:
      uint8 [size, size, 3].

    Raises:
      OSError, SyntaxError, ValueError, …: not an image, or not a whole one.
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
    if image.mode == "I;16":  # Pillow would clip 16 bits instead of scaling them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA")  # a palette may hold transparent colors
    return image if image.mode == "RGB" else image.convert("RGB")


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """A part of random area (8 to 100 %) and shape (3:4 to 4:3), in whole pixels.

    If ten attempts do not fit into the image: its middle, as large as the shape may be.

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
    """The middle square, 224/256 of the shorter side.

    >>> center_box(512, 256)
    (144.0, 16.0, 368.0, 240.0)
    """
    side = min(width, height) / SHORTER_SIDE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
