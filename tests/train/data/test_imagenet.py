"""Images in one folder per class: finding them, errors, decoding."""

import os
import shutil

import numpy as np
import pytest
from images import make_folder, picture
from PIL import ExifTags, Image, ImageOps

from train.__main__ import main
from train.data import imagenet
from train.data.arrays import DataError


# Finding images


def test_classes_and_images_are_in_alphabetical_order(tmp_path):
    make_folder(tmp_path, classes=("bee", "ant"), train=3, val=2)
    ants = tmp_path / "train" / "ant"
    (ants / "B.JpG").write_bytes(b"")
    for suffix in ("gif", "tiff", "tif", "jfif", "jpe"):
        (ants / f"C.{suffix}").write_bytes(b"")
    (ants / "gone.png").symlink_to(tmp_path / "nowhere")
    (ants / "readme.txt").write_text("no image")
    (ants / "._0.JPEG").write_text("another system's notes")
    (ants / "folder.jpeg").mkdir()
    for part in "train", "val":  # as a notebook and a file manager leave them
        shutil.copytree(ants, tmp_path / part / ".ipynb_checkpoints", symlinks=True)
    (tmp_path / "val" / ".trash").mkdir()
    os.mkfifo(ants / "fifo.jpeg")
    (tmp_path / "train" / "list.txt").write_text("ant bee")
    found = imagenet.load(tmp_path, image_size=32)
    assert found.train.classes == found.test.classes == ("ant", "bee")
    assert (found.num_classes, found.image_shape) == (2, (32, 32, 3))
    names = [found.train.path(i) for i in range(len(found.train.labels))]
    names_of_ants = "0.JPEG 1.JPEG 2.JPEG B.JpG C.gif C.jfif C.jpe C.tif C.tiff gone.png"
    expected = [f"ant/{x}" for x in names_of_ants.split()]
    expected += [f"bee/{i}.JPEG" for i in range(3)]
    assert names == [f"{tmp_path}/train/{x}" for x in expected]
    assert found.train.labels.tolist() == [0] * 10 + [1] * 3
    left_out = [f"{ants}/{x}" for x in ("fifo.jpeg", "folder.jpeg", "readme.txt")]
    assert found.train.left_out == tuple(left_out)
    assert found.train.labels.dtype == np.int32
    assert found.test.path(3) == f"{tmp_path}/val/bee/1.JPEG"


def test_file_names_need_not_be_unicode(tmp_path):
    make_folder(tmp_path, ("ant", "bee"), train=1, val=1)
    name = b"\xff\xfe.jpeg"
    source = tmp_path / "train" / "ant" / "0.JPEG"
    try:
        with open(bytes(source.parent) + b"/" + name, "xb") as file:
            file.write(source.read_bytes())
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    found = imagenet.load(tmp_path)
    with open(found.train.path(1), "rb") as file:
        assert file.read() == source.read_bytes()
    assert len(found.digest()) == 64


def test_the_digest_distinguishes_folders(tmp_path):
    make_folder(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    digest = lambda: imagenet.load(tmp_path / "b").digest()
    before = digest()
    assert before == imagenet.load(tmp_path / "a").digest()
    one = tmp_path / "b" / "val" / "ant" / "0.JPEG"
    one.rename(one.with_name("9.JPEG"))
    assert digest() != before


def test_some_reads_center_crops_and_skips_unreadable_files(tmp_path):
    make_folder(tmp_path, classes=("ant", "bee"), train=4, val=1)
    (tmp_path / "train" / "ant" / "1.JPEG").write_bytes(b"no image")
    files = imagenet.load(tmp_path, image_size=32).train
    images = imagenet.some(files, count=5, seed=0, size=32)
    again = imagenet.some(files, count=5, seed=0, size=32)
    np.testing.assert_array_equal(images.images, again.images)
    assert images.images.shape == (5, 32, 32, 3) and images.images.dtype == np.uint8
    every = imagenet.some(files, count=100, seed=1, size=32)
    assert np.bincount(every.labels).tolist() == [3, 4]
    for path in (tmp_path / "train").glob("*/*.JPEG"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="no image in .*train can be read"):
        imagenet.some(files, count=5, seed=0, size=32)


# Errors


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def loose(folder):
    empty(folder / "val")
    for i in range(2):
        (folder / "val" / f"{i}.JPEG").write_bytes(b"")


def nest(folder):
    """Moves all images of a class one folder deeper."""
    images = list(folder.iterdir())
    (folder / "deep").mkdir()
    for path in images:
        path.rename(folder / "deep" / path.name)


def file_in_its_place(folder):
    shutil.rmtree(folder)
    folder.write_bytes(b"")


WRONG = {
    "no folder": (shutil.rmtree, "does not exist; images must be in a folder with tr"),
    "a file": (file_in_its_place, "data is not a folder; images must be in a folder"),
    "no train": (lambda d: shutil.rmtree(d / "train"), "train is missing; it must hold"),
    "empty train": (lambda d: empty(d / "train"), "hold one folder per class, got none"),
    "loose images": (loose, "got none, but 2 images; use class folders"),
    "empty class": (lambda d: empty(d / "train" / "bee"), "but none is in bee/"),
    "less in val": (
        lambda d: shutil.rmtree(d / "val" / "cat"),
        "must have the same classes, but 1 of them are only in train: cat",
    ),
    "less in train": (
        lambda d: [shutil.rmtree(d / "train" / x) for x in ("ant", "bee")],
        "must have the same classes, but 2 of them are only in val: ant, bee",
    ),
    "one class": (
        lambda d: [shutil.rmtree(x) for x in d.glob("*/*") if x.name != "bee"],
        "must have at least two classes to tell apart, a folder for each, got only bee",
    ),
    "nested folders": (
        lambda d: [nest(x) for x in d.glob("*/bee")],
        "none is in bee/; left out, because they are no images: 1 without a suffix (",
    ),
    "no images": (
        lambda d: [path.write_bytes(b"") for path in (d / "train").rglob("*.JPEG")],
        "24 images in a row cannot be read, the last",
    ),
    "nothing to test": (
        lambda d: [path.write_bytes(b"no") for path in (d / "val").rglob("*.JPEG")],
        "2.JPEG: it is no JPEG, PNG, BMP, WebP, GIF or TIFF image",
    ),
}
OPTIONS = {
    "": "`data.dir` must name the folder with train/CLASS/*.JPEG",
    "--model cnn7 --data.dir DIR": "'cnn7' takes 28 x 28 images, 'imagenet' has",
    "--batch-size 25 --data.dir DIR": "`batch_size` must be at most 24",
    "--data.shard --data.dir DIR": "`batch_size` must be at most 6",
}
SMALL = "--model digits-bn --data.crop 16 --batch-size 2 --data.dir DIR"


@pytest.mark.parametrize(
    "change, options, message",
    [(change, SMALL, message) for change, message in WRONG.values()]
    + [(lambda d: None, options, message) for options, message in OPTIONS.items()],
    ids=[*WRONG, "no data.dir", "another network", "a large batch", "small parts"],
)
def test_wrong_folders_are_refused(change, options, message, tmp_path, refusal):
    folder = make_folder(tmp_path / "data")
    change(folder)
    words = options.replace("DIR", str(folder)).split()
    assert message in refusal(main, ["image-folder", *words])


# Decoding


@pytest.fixture
def photo():
    """An image of 500 x 400 with structure at all scales."""
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (n, n, 3), np.uint8) for n in (4, 16, 64)]
    layers = [np.asarray(Image.fromarray(x).resize((500, 400))) for x in noise]
    return Image.fromarray(np.mean(layers, axis=0).astype(np.uint8))


def root_mean_square(a, b):
    return np.sqrt(np.mean((a.astype(float) - b.astype(float)) ** 2))


def test_random_crops_have_the_documented_distribution():
    rng = np.random.default_rng(0)
    boxes = np.array([imagenet.random_box(500, 400, rng) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert left.min() == top.min() == 0 and right.max() == 500 and bottom.max() == 400
    width, height = right - left, bottom - top
    area, ratio = width * height / (500 * 400), width / height
    assert 0.078 < area.min() < 0.09 and 0.9 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.76 and 1.31 < ratio.max() < 1.35
    # Small crops always fit: area and log-shape are uniform.
    small = area < 0.5
    assert np.mean(area[small]) == pytest.approx((0.08 + 0.5) / 2, abs=0.01)
    assert np.mean(np.log(ratio[small])) == pytest.approx(0, abs=0.02)


def test_crops_lie_inside_images_of_any_shape():
    for width, height in ((1, 1), (1, 1000), (1000, 1), (3, 2), (2000, 10)):
        for seed in range(20):
            box = imagenet.random_box(width, height, np.random.default_rng(seed))
            assert 0 <= box[0] < box[2] <= width and 0 <= box[1] < box[3] <= height
    # If nothing fits, the crop is the middle.
    assert imagenet.random_box(1000, 30, np.random.default_rng(0)) == (480, 0, 520, 30)
    assert imagenet.random_box(30, 1000, np.random.default_rng(0)) == (0, 480, 30, 520)


def test_crops_are_scaled_with_antialiasing(photo, tmp_path):
    path = tmp_path / "a.png"
    photo.save(path)
    got = imagenet.read(path, 224, imagenet.center_box)
    scaled = photo.resize((320, 256), Image.Resampling.BILINEAR)
    expected = np.asarray(scaled.crop((48, 16, 48 + 224, 16 + 224)))
    assert got.shape == (224, 224, 3) and got.dtype == np.uint8
    assert root_mean_square(got, expected) < 0.5
    got = imagenet.read(path, 32, lambda width, height: (100, 50, 356, 306))
    whole = np.asarray(photo)[50:306, 100:356].astype(float)
    assert root_mean_square(got, whole.reshape(32, 8, 32, 8, 3).mean(axis=(1, 3))) < 4


KINDS = {
    "jpeg": ["RGB", "L", "CMYK"],
    "png": ["RGB", "L", "1", "P", "transparent P", "RGBA", "LA", "I;16"],
    "bmp": ["RGB", "L", "1", "P"],
    "webp": ["RGB", "RGBA"],
    "gif": ["L", "P"],
    "tiff": ["RGB", "L", "1", "P", "RGBA", "CMYK", "I;16", "I;16B"],
}


@pytest.mark.parametrize(
    "suffix, mode", [(suffix, mode) for suffix in KINDS for mode in KINDS[suffix]]
)
def test_all_modes_are_converted_to_rgb(suffix, mode, tmp_path):
    image, options = picture(np.random.default_rng(0)), {}
    if mode.startswith("I;16"):
        gray = np.asarray(image.convert("L")).astype(">u2" if mode == "I;16B" else "<u2")
        stored, expected = Image.fromarray(gray * 257), image.convert("L")
    else:
        stored = expected = image.convert(mode.split()[-1])
    if mode == "transparent P":  # Pillow warns unless it is converted to RGBA
        options = {"transparency": bytes(range(256))}
    stored.save(tmp_path / f"a.{suffix}", lossless=True, quality=100, **options)
    box = lambda width, height: (0, 0, 30, 30)
    got = imagenet.read(tmp_path / f"a.{suffix}", 30, box)
    wanted = np.asarray(expected.convert("RGB").crop((0, 0, 30, 30)))
    assert got.shape == (30, 30, 3)
    assert root_mean_square(got, wanted) < (20 if mode == "1" else 4)


def test_large_jpegs_are_decoded_at_a_smaller_size(photo, tmp_path, monkeypatch):
    path = tmp_path / "a.jpeg"
    photo.resize((2000, 1500)).save(path, quality=95)
    decoded, resize = [], Image.Image.resize
    note = lambda self, *args: decoded.append(self.size) or resize(self, *args)
    monkeypatch.setattr(Image.Image, "resize", note)
    boxes = [(0, 0, 2000, 1500), (101, 203, 1103, 1007), (700, 300, 1000, 620)]
    for box in boxes:
        small = imagenet.read(path, 224, lambda width, height, box=box: box)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(imagenet, "SPARE", 1e9)
            whole = imagenet.read(path, 224, lambda width, height, box=box: box)
        assert root_mean_square(small, whole) < 1
    assert decoded[0] == (1000, 750)  # 750 > 2 x 224
    assert decoded[1::2] == [(2000, 1500)] * 3
    assert decoded[4] == (2000, 1500)  # a small crop needs the full size


@pytest.mark.parametrize("suffix", ["jpeg", "png", "tiff"])
def test_images_are_turned_upright(suffix, photo, tmp_path):
    """A JPEG is decoded at half of its size before it is turned."""
    small = photo.resize((250, 200))
    box_of = lambda width, height: (0.1 * width, 0, width, 0.8 * height)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        small.save(path := tmp_path / f"{orientation}.{suffix}", exif=exif, quality=95)
        ImageOps.exif_transpose(Image.open(path)).save(tmp_path / "upright.png")
        got = imagenet.read(path, 32, box_of)
        assert (
            root_mean_square(got, imagenet.read(tmp_path / "upright.png", 32, box_of)) < 2
        )


def test_pixels_of_an_unknown_range_are_refused(tmp_path):
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match="32-bit numbers, whose range is unknown"):
        imagenet.read(tmp_path / "a.tiff", 4, imagenet.center_box)


def test_a_large_image_is_read_without_words(photo, tmp_path, monkeypatch):
    make_folder(tmp_path / "data")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150_000)
    photo.save(tmp_path / "a.png")
    imagenet.load(tmp_path / "data")
    imagenet.read(tmp_path / "a.png", 32, imagenet.center_box)  # warnings are errors
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90_000)
    with pytest.raises(Image.DecompressionBombError):
        imagenet.read(tmp_path / "a.png", 32, imagenet.center_box)


@pytest.mark.parametrize(
    "content",
    [b"", b"no image", b"\xff\xd8\xff\xe0", b"%!PS\n", "cut.jpeg", "cut.png"],
)
def test_broken_and_truncated_images_raise(content, photo, tmp_path):
    path = tmp_path / "a.jpeg"
    if isinstance(content, str):
        photo.save(tmp_path / content)
        content = (tmp_path / content).read_bytes()[:5000]
    path.write_bytes(content)
    with pytest.raises(OSError):
        imagenet.read(path, 32, imagenet.center_box)
