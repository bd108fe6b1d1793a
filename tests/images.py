"""Folders of made-up images, for tests of what reads them."""

import numpy as np
from PIL import Image


def picture(rng, width=40, height=30):
    """A smooth random image in color."""
    coarse = rng.integers(0, 256, size=(4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def make_folder(folder, classes=("ant", "bee", "cat"), train=8, val=3, seed=0):
    """FOLDER/train/CLASS/i.JPEG and FOLDER/val/CLASS/i.JPEG, of various shapes."""
    rng = np.random.default_rng(seed)
    for part, count in (("train", train), ("val", val)):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                image = picture(rng, 40 + 4 * i, 30 + 20 * (i % 2))
                image.save(folder / part / name / f"{i}.JPEG", quality=95)
    return folder
