"""CIFAR-10 is read alike from every form of the files; other files are refused."""

import gzip
import hashlib
import io
import os
import pathlib
import pickle
import struct
import tarfile
import tracemalloc

import numpy as np
import pytest

from train.data import cifar10
from train.data.arrays import DataError


BIN, PY = "cifar-10-batches-bin", "cifar-10-batches-py"
BIN_ARCHIVE, PY_ARCHIVE = "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"
SOURCES = (BIN, PY, BIN_ARCHIVE, PY_ARCHIVE)
NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
RECORDS = 1_000  # per file, a tenth of the official number
SIZE = RECORDS * 3073
OPTION = "--data.accept-other-files"


def batch(seed, records=RECORDS):
    """Labels [N] and pixels [N, 3072], with few patterns so that they zip well."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(256, size=(8, 3072), dtype=np.uint8)
    labels = rng.integers(10, size=records, dtype=np.uint8)
    return labels, patterns[rng.integers(8, size=records)]


def python2_pickle(labels, pixels):
    """A batch, byte for byte as Python 2 and NumPy 1 pickled the official ones."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01(M"
        + struct.pack("<H", len(labels))
        + b"M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<i", pixels.nbytes) + pixels.tobytes() + b"tb"
    )
    classes = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + classes + b"u."


def pack(archive, folder):
    """Zips a folder, its files in no particular order, as the official archives are."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(folder, arcname=folder.name, recursive=False)
        for path in sorted(folder.iterdir(), key=lambda p: p.name[::-1]):
            tar.add(path, arcname=f"{folder.name}/{path.name}")


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def make(root, records=RECORDS):
    """Fills a folder with made-up data in all four official forms."""
    (root / BIN).mkdir()
    (root / PY).mkdir()
    for seed, name in enumerate(NAMES):
        labels, pixels = batch(seed, records)
        rows = np.concatenate([labels[:, None], pixels], axis=1)
        (root / BIN / f"{name}.bin").write_bytes(rows.tobytes())
        (root / PY / name).write_bytes(python2_pickle(labels, pixels))
    (root / BIN / "batches.meta.txt").write_text("airplane\n")
    (root / PY / "batches.meta").write_bytes(pickle.dumps("not to be read"))
    pack(root / BIN_ARCHIVE, root / BIN)
    pack(root / PY_ARCHIVE, root / PY)
    return root


def sums_of(root):
    files = [root / BIN / f"{name}.bin" for name in NAMES]
    files += [root / PY / name for name in NAMES]
    files += [root / BIN_ARCHIVE, root / PY_ARCHIVE]
    return {str(path.relative_to(root)): md5(path) for path in files}


def images_of(records):
    """The images and labels of the six files, put together plane by plane."""
    images = np.empty((6 * records, 32, 32, 3), np.uint8)
    labels = []
    for seed in range(6):
        classes, pixels = batch(seed, records)
        labels.append(classes)
        for c in range(3):
            plane = pixels[:, c * 1024 : (c + 1) * 1024].reshape(-1, 32, 32)
            images[seed * records : (seed + 1) * records, :, :, c] = plane
    return images, np.concatenate(labels)


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    return make(tmp_path_factory.mktemp("official"))


@pytest.fixture(scope="module")
def sums(official):
    return sums_of(official)


@pytest.fixture(scope="module")
def expected():
    return images_of(RECORDS)


@pytest.fixture(autouse=True)
def fewer_records(monkeypatch, sums):
    """Accepts the made-up files as the official ones."""
    assert sums.keys() == cifar10.MD5.keys()
    binary = cifar10.BINARY._replace(sizes=range(SIZE, SIZE + 1))
    monkeypatch.setattr(cifar10, "MD5", dict(sums))
    monkeypatch.setattr(cifar10, "RECORDS", RECORDS)
    monkeypatch.setattr(cifar10, "NUM_TRAIN", 5 * RECORDS)
    monkeypatch.setattr(cifar10, "FORMS", (binary, cifar10.PYTHON))


@pytest.fixture
def copy(official, tmp_path):
    """Copies one of the forms to a place where its files may be replaced."""

    def link(source):
        if (official / source).is_file():
            (tmp_path / source).symlink_to(official / source)
        else:
            (tmp_path / source).mkdir()
            for path in (official / source).iterdir():
                (tmp_path / source / path.name).symlink_to(path)
        return tmp_path / source

    return link


def replace(path, data):
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def write_archive(path, members):
    """An archive of (name, bytes) members; bytes None makes a symlink."""
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            if data is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/hostname"
                tar.addfile(info)
            else:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def refused(folder, accept_other_files=False):
    """The message of the error, which is one line."""
    with pytest.raises(DataError) as caught:
        cifar10.load(folder, accept_other_files)
    message = str(caught.value)
    assert "\n" not in message
    return message


class Trap:
    """A pickle that leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


# What is accepted


def check(dataset, expected):
    images, labels = expected
    train, test = slice(len(labels) * 5 // 6), slice(len(labels) * 5 // 6, None)
    assert dataset.num_classes == 10
    for part, rows in ((dataset.train, train), (dataset.test, test)):
        assert part.images.dtype == np.uint8 and part.labels.dtype == np.int32
        # Not assert_array_equal, which makes several copies.
        assert np.array_equal(part.images, images[rows])
        assert np.array_equal(part.labels, labels[rows])


@pytest.mark.slow
def test_files_of_the_official_sizes(tmp_path, monkeypatch):
    monkeypatch.undo()
    root = make(tmp_path, 10_000)
    monkeypatch.setattr(cifar10, "MD5", sums_of(root))
    for source in SOURCES:
        check(cifar10.load(root / source), images_of(10_000))


def test_the_sizes_without_what_the_tests_change(monkeypatch):
    monkeypatch.undo()
    assert (cifar10.RECORDS, cifar10.NUM_TRAIN) == (10_000, 50_000)
    assert list(cifar10.BINARY.sizes) == [30_730_000]


@pytest.mark.parametrize("source", SOURCES)
def test_a_form_itself(source, official, expected):
    before = sorted(official.rglob("*"))
    check(cifar10.load(official / source), expected)
    assert sorted(official.rglob("*")) == before


@pytest.mark.parametrize("source", [BIN, PY])
def test_a_folder_with_a_form_inside(source, copy, expected):
    check(cifar10.load(str(copy(source).parent)), expected)


def test_folders_come_before_archives_and_binary_before_python(tmp_path, copy):
    for source in (PY_ARCHIVE, BIN_ARCHIVE, PY, BIN):
        copied = copy(source)
        assert cifar10._find(tmp_path)[1] == copied


def test_paths_may_be_relative_renamed_or_from_home(copy, tmp_path, monkeypatch, expected):
    renamed = copy(BIN).rename(tmp_path / "data")
    monkeypatch.chdir(renamed)
    check(cifar10.load("."), expected)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"{tmp_path / 'nothing'} does not exist" in refused("~/nothing")


def test_holds_less_than_two_copies(official):
    tracemalloc.start()
    try:
        cifar10.load(official / BIN_ARCHIVE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * 6 * RECORDS * 3072


def test_other_binary_files_are_accepted_on_demand(copy, expected):
    folder = copy(BIN)
    data = bytearray((folder / "test_batch.bin").read_bytes())
    data[1] ^= 255
    replace(folder / "test_batch.bin", data)
    dataset = cifar10.load(folder, accept_other_files=True)
    assert dataset.test.images[0, 0, 0, 0] == 255 - expected[0][5 * RECORDS, 0, 0, 0]


def test_a_repacked_archive_is_accepted_on_demand(official, sums, monkeypatch, expected):
    monkeypatch.setitem(cifar10.MD5, BIN_ARCHIVE, "0" * 32)
    path = official / BIN_ARCHIVE
    message = refused(path)
    assert message.startswith(f"{path} has the MD5 sum {sums[BIN_ARCHIVE]}")
    assert "0" * 32 in message and OPTION in message
    check(cifar10.load(path, accept_other_files=True), expected)


# What is not there


def test_no_such_folder(tmp_path):
    message = refused(tmp_path / "none")
    assert "none does not exist" in message
    assert all(source in message for source in SOURCES)


def test_a_folder_without_data(tmp_path):
    message = refused(tmp_path)
    assert "holds no CIFAR-10" in message
    assert all(source in message for source in SOURCES)


def test_an_empty_folder_of_the_right_name(tmp_path):
    (tmp_path / BIN).mkdir()
    assert "data_batch_1.bin is missing" in refused(tmp_path)


def test_a_file_of_another_name(tmp_path):
    path = replace(tmp_path / "cifar-100-binary.tar.gz", b"")
    assert "no archive by its name" in refused(path)


@pytest.mark.parametrize("source, name", [(BIN, "data_batch_2.bin"), (PY, "data_batch_2")])
def test_a_missing_file(source, name, copy):
    folder = copy(source)
    (folder / name).unlink()
    message = refused(folder)
    assert f"{folder / name} is missing" in message and "test_batch" in message


def test_a_folder_in_place_of_a_file(copy):
    folder = copy(BIN)
    (folder / "data_batch_1.bin").unlink()
    (folder / "data_batch_1.bin").mkdir()
    assert "data_batch_1.bin is missing" in refused(folder)


def test_what_the_system_refuses(tmp_path):
    assert "cannot be read" in refused(tmp_path / ("x" * 5000))


# Files that differ


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize(
    "size, wrong",
    [(0, "truncated"), (SIZE - 1, "truncated"), (SIZE + 1, "too long")],
)
def test_a_binary_file_of_another_size(size, wrong, accept, copy):
    path = replace(copy(BIN) / "data_batch_1.bin", bytes(size))
    message = refused(path.parent, accept)
    assert f"{path} is {wrong}: {size:,} bytes instead of {SIZE:,}" in message


@pytest.mark.parametrize("source", [BIN, BIN_ARCHIVE])
@pytest.mark.parametrize("accept", [False, True])
def test_a_binary_file_of_other_content(source, accept, tmp_path, copy, sums):
    data = bytes([3]) * SIZE
    if source == BIN:
        place = str(replace(copy(BIN) / "data_batch_1.bin", data))
    else:
        path = write_archive(tmp_path / source, [(f"{BIN}/data_batch_1.bin", data)])
        place = f"{BIN}/data_batch_1.bin in {path}"
    if accept and source == BIN:
        dataset = cifar10.load(tmp_path, accept_other_files=True)
        assert (dataset.train.images[:RECORDS] == 3).all()
        return
    message = refused(tmp_path, accept)
    if accept:
        assert "lacks" in message
    else:
        assert message.startswith(f"{place} has the MD5 sum")
        assert hashlib.md5(data).hexdigest() in message
        assert sums[f"{BIN}/data_batch_1.bin"] in message
        assert OPTION in message


@pytest.mark.parametrize("label", [10, 255])
def test_a_label_out_of_range(label, copy):
    path = replace(copy(BIN) / "data_batch_1.bin", bytes([label]) * SIZE)
    assert f"{path} has a label {label}; " in refused(path.parent, True)


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize("source", [PY, PY_ARCHIVE])
@pytest.mark.parametrize("name", ["data_batch_1", "test_batch"])
def test_another_pickle_is_never_unpickled(source, name, accept, copy, tmp_path, sums):
    left = tmp_path / "left-behind"
    trap = pickle.dumps(Trap(left))
    pickle.loads(trap)
    assert left.exists()
    left.unlink()
    if source == PY:
        replace(copy(PY) / name, trap)
    else:
        write_archive(tmp_path / PY_ARCHIVE, [(f"{PY}/{name}", trap)])
    message = refused(tmp_path, accept)
    assert not left.exists()
    assert hashlib.md5(trap).hexdigest() in message
    assert sums[f"{PY}/{name}"] in message
    assert "never" in message and BIN_ARCHIVE in message and OPTION not in message


def test_what_else_an_archive_holds_is_not_read(official, tmp_path, expected):
    left = tmp_path / "left-behind"
    trap = pickle.dumps(Trap(left))
    members = [("../escaped", trap), (f"{PY}/batches.meta", trap), ("test_batch", trap)]
    members += [(f"{PY}/{name}", (official / PY / name).read_bytes()) for name in NAMES]
    path = write_archive(tmp_path / PY_ARCHIVE, members)
    check(cifar10.load(path, accept_other_files=True), expected)
    assert list(tmp_path.iterdir()) == [path]
    assert not (tmp_path.parent / "escaped").exists()


@pytest.mark.parametrize("accept", [False, True])
def test_a_truncated_pickle(accept, copy):
    path = copy(PY) / "data_batch_1"
    replace(path, path.read_bytes()[:-1])
    assert f"{path} has the MD5 sum" in refused(path.parent, accept)


def test_a_pickle_that_is_too_long(copy):
    path = replace(copy(PY) / "data_batch_1", b"")
    os.truncate(path, 2**40)
    assert f"{path} is too long: {2**40:,} bytes" in refused(path.parent)


# Archives that differ


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize("archive", [BIN_ARCHIVE, PY_ARCHIVE])
@pytest.mark.parametrize(
    "content",
    [b"", b"<html>not found</html>", gzip.compress(b"no tar" * 1000), gzip.compress(b"")],
    ids=["empty", "html", "no tar", "empty zip"],
)
def test_an_archive_by_its_name_only(content, archive, accept, tmp_path):
    path = replace(tmp_path / archive, content)
    message = refused(tmp_path, accept)
    assert message.startswith(f"{path} is damaged, or no .tar.gz archive (")
    assert cifar10.HOME in message


@pytest.mark.parametrize(
    "archive, keep, accept",
    [
        (BIN_ARCHIVE, 15, False),
        (BIN_ARCHIVE, 5_000, True),
        (BIN_ARCHIVE, -9, True),
        (PY_ARCHIVE, 15, True),
        (PY_ARCHIVE, 5_000, False),
    ],
)
def test_a_truncated_archive(archive, keep, accept, official, tmp_path):
    path = replace(tmp_path / archive, (official / archive).read_bytes()[:keep])
    assert f"{path} is damaged, or no .tar.gz archive (" in refused(tmp_path, accept)


def test_a_corrupt_archive(official, tmp_path):
    data = bytearray((official / BIN_ARCHIVE).read_bytes())
    data[-8] ^= 255
    path = replace(tmp_path / BIN_ARCHIVE, data)
    message = refused(path, accept_other_files=True)
    assert f"{path} is damaged, or no .tar.gz archive (CRC" in message


@pytest.mark.parametrize("accept", [False, True])
def test_an_archive_without_the_files(accept, tmp_path):
    members = [("cifar-100-binary/train.bin", b"1"), (f"{BIN}/test_batch.bin", None)]
    path = write_archive(tmp_path / BIN_ARCHIVE, members)
    message = refused(path, accept)
    assert f"{path} lacks {BIN}/data_batch_1.bin, " in message
    assert f"{BIN}/test_batch.bin; " in message


@pytest.mark.parametrize("size, wrong", [(SIZE - 1, "truncated"), (SIZE + 1, "too long")])
def test_an_archived_file_of_another_size(size, wrong, tmp_path):
    name = f"{BIN}/data_batch_1.bin"
    path = write_archive(tmp_path / BIN_ARCHIVE, [(name, bytes(size))])
    assert f"{name} in {path} is {wrong}: {size:,} bytes" in refused(path, True)
