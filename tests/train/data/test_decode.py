"""Decoding: random and middle parts of images of every kind, as RGB of one size."""

import numpy as np
import pytest
from images import picture
from PIL import Image

from train.data import imagenet


@pytest.fixture
def photo():
    """An image of 500 x 400 with structure at all scales."""
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (n, n, 3), np.uint8) for n in (4, 16, 64)]
    layers = [np.asarray(Image.fromarray(x).resize((500, 400))) for x in noise]
    return Image.fromarray(np.mean(layers, axis=0).astype(np.uint8))


def root_mean_square(a, b):
    return np.sqrt(np.mean((a.astype(float) - b.astype(float)) ** 2))


def test_random_parts_have_the_areas_and_shapes_they_should():
    rng = np.random.default_rng(0)
    boxes = np.array([imagenet.random_box(500, 400, rng) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert left.min() == top.min() == 0 and right.max() == 500 and bottom.max() == 400
    width, height = right - left, bottom - top
    area, ratio = width * height / (500 * 400), width / height
    assert 0.078 < area.min() < 0.09 and 0.9 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.76 and 1.31 < ratio.max() < 1.35
    small = (
        area < 0.5
    )  # these always fit: uniform in the area and the logarithm of the shape
    assert np.mean(area[small]) == pytest.approx((0.08 + 0.5) / 2, abs=0.01)
    assert np.mean(np.log(ratio[small])) == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (1000, 1), (3, 2), (2000, 10)])
def test_a_part_of_an_image_of_any_shape_lies_inside(size):
    for seed in range(20):
        box = imagenet.random_box(*size, np.random.default_rng(seed))
        assert 0 <= box[0] < box[2] <= size[0] and 0 <= box[1] < box[3] <= size[1]


def test_where_nothing_fits_the_middle_is_taken():
    assert imagenet.random_box(1000, 30, np.random.default_rng(0)) == (480, 0, 520, 30)
    assert imagenet.random_box(30, 1000, np.random.default_rng(0)) == (0, 480, 30, 520)


def test_the_middle_is_that_of_the_image_scaled_to_256(photo, tmp_path):
    photo.save(tmp_path / "a.png")
    got = imagenet.read(tmp_path / "a.png", 224, imagenet.center_box)
    scaled = photo.resize((320, 256), Image.Resampling.BILINEAR)
    expected = np.asarray(scaled.crop((48, 16, 48 + 224, 16 + 224)))
    assert got.shape == (224, 224, 3) and got.dtype == np.uint8
    assert root_mean_square(got, expected) < 0.5


def test_a_part_is_scaled_with_antialiasing(photo, tmp_path):
    photo.save(tmp_path / "a.png")
    got = imagenet.read(tmp_path / "a.png", 32, lambda width, height: (100, 50, 356, 306))
    whole = np.asarray(photo)[50:306, 100:356].astype(float)
    means = whole.reshape(32, 8, 32, 8, 3).mean(axis=(1, 3))
    assert root_mean_square(got, means) < 4


KINDS = {
    "jpeg": ["RGB", "L", "CMYK"],
    "png": ["RGB", "L", "1", "P", "RGBA", "LA", "I;16"],
    "bmp": ["RGB", "L", "1", "P"],
    "webp": ["RGB", "RGBA"],
}


@pytest.mark.parametrize(
    "suffix, mode", [(suffix, mode) for suffix in KINDS for mode in KINDS[suffix]]
)
def test_every_kind_of_image_becomes_rgb(suffix, mode, tmp_path):
    image = picture(np.random.default_rng(0))
    if mode == "I;16":
        gray = np.asarray(image.convert("L")).astype(np.uint16)
        stored, expected = Image.fromarray(gray * 257), image.convert("L")
    else:
        stored, expected = image.convert(mode), image.convert(mode)
    path = tmp_path / f"a.{suffix}"
    stored.save(path, lossless=True, quality=100)
    got = imagenet.read(path, 30, lambda width, height: (0, 0, 30, 30))
    wanted = np.asarray(expected.convert("RGB").crop((0, 0, 30, 30)))
    assert got.shape == (30, 30, 3)
    assert root_mean_square(got, wanted) < (20 if mode == "1" else 4)


def test_transparent_palettes_are_no_warning(tmp_path):
    image = picture(np.random.default_rng(0)).convert("P")
    image.save(tmp_path / "a.png", transparency=bytes(range(256)))
    got = imagenet.read(tmp_path / "a.png", 30, lambda width, height: (0, 0, 30, 30))
    wanted = np.asarray(image.convert("RGB").crop((0, 0, 30, 30)))
    assert root_mean_square(got, wanted) < 1


def test_large_jpegs_are_decoded_small_and_look_the_same(photo, tmp_path, monkeypatch):
    path = tmp_path / "a.jpeg"
    photo.resize((2000, 1500)).save(path, quality=95)
    decoded = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image,
        "resize",
        lambda self, *args: decoded.append(self.size) or resize(self, *args),
    )
    boxes = [(0, 0, 2000, 1500), (101, 203, 1103, 1007), (700, 300, 1000, 620)]
    for box in boxes:
        small = imagenet.read(path, 224, lambda width, height, box=box: box)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(imagenet, "SPARE", 1e9)
            whole = imagenet.read(path, 224, lambda width, height, box=box: box)
        assert root_mean_square(small, whole) < 1
    assert decoded[0] == (1000, 750)  # 750 > 2 x 224
    assert decoded[1::2] == [(2000, 1500)] * 3
    assert decoded[4] == (2000, 1500)  # a small part is taken from the whole


@pytest.mark.parametrize("content", [b"", b"no image", b"\xff\xd8\xff\xe0", b"%!PS\n"])
def test_what_is_no_image_raises(content, tmp_path):
    (tmp_path / "a.jpeg").write_bytes(content)
    with pytest.raises(OSError):
        imagenet.read(tmp_path / "a.jpeg", 32, imagenet.center_box)


def test_a_truncated_image_raises(photo, tmp_path):
    for suffix in ("jpeg", "png"):
        path = tmp_path / f"a.{suffix}"
        photo.save(path)
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(OSError):
            imagenet.read(path, 32, imagenet.center_box)
