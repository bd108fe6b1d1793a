"""Reading images ahead: the choice of images, broken files, bounds, the end."""

import contextlib
import errno
import re
import shutil
import threading
import time
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from images import make_folder
from outside import until

from train.data import imagenet, stream
from train.data.arrays import DataError
from train.data.in_flight import Backlog
from train.data.sampler import EpochSampler, parts
from train.data.stream import Stream
from train.task import images


SIZE, BATCH, SEED, THREADS = 16, 3, 7, 3


class Grid:
    """The grid of a process that owns some of 4 workers, without devices."""

    num_workers = 4

    def __init__(self, first=0, last=4):
        self.owned = range(first, last)

    def put_owned(self, tree):
        return tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """24 training images of 3 classes and 9 test images, all readable."""
    return make_folder(tmp_path_factory.mktemp("images") / "data")


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "data")


def make_stream(folder, grid=None, *, shard=False, ahead=2, warn=pytest.fail):
    """A stream of small batches with 8 steps per epoch (2 with separate parts)."""
    data = imagenet.load(folder, SIZE)
    count = len(data.train.labels)
    return Stream(
        data,
        EpochSampler(count // (4 if shard else 1), BATCH, SEED),
        grid or Grid(),
        parts(count, 4, SEED) if shard else None,
        2,
        seed=SEED,
        threads=THREADS,
        ahead=ahead,
        warn=warn,
    )


def take(stream, start, stop):
    with contextlib.closing(stream.batches(range(start, stop))) as batches:
        return list(batches)


def cropped(path, worker, step, place):
    """The crop of an image that a worker sees at a place in a batch."""
    rng = np.random.default_rng([SEED, worker, step, place, stream.CROPS])
    box_of = lambda width, height: imagenet.random_box(width, height, rng)
    return imagenet.read(path, SIZE, box_of)


def assert_equal(some, others):
    assert len(some) > 0
    jax.tree.map(np.testing.assert_array_equal, some, others)


@pytest.fixture
def read(monkeypatch):
    """The paths of the files that are read, in order."""
    paths, original = [], imagenet.read
    note = lambda path, *rest: paths.append(path) or original(path, *rest)
    monkeypatch.setattr(imagenet, "read", note)
    return paths


@pytest.fixture
def brief(monkeypatch):
    """The system gets a third of a second to give a file, in place of a minute."""
    monkeypatch.setattr(imagenet, "WAITS", (0.05, 0.1, 0.15))


def readers():
    return [x for x in threading.enumerate() if x.name.startswith("grain")]


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    """After each test all readers stop, once a thread has finished its current image."""
    yield
    until(lambda: not readers(), seconds=10)


# The choice of images


def test_each_worker_sees_each_image_once_per_epoch_in_a_stable_order():
    sampler = EpochSampler(size=14, batch_size=4, seed=0)
    assert sampler.steps_per_epoch == 3  # two images do not fill a batch
    rows = np.stack([sampler.rows(step, range(3)) for step in range(6)])
    epochs = rows.reshape(2, 3, 3, 4).swapaxes(1, 2).reshape(6, 12)
    assert all(len(set(epoch)) == 12 and set(epoch) <= set(range(14)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6  # one for each worker and epoch
    # The order depends neither on earlier calls nor on the process.
    again = EpochSampler(14, 4, seed=0)
    np.testing.assert_array_equal(again.rows(5, range(1, 3)), rows[5, 1:])
    assert not np.array_equal(EpochSampler(14, 4, seed=1).rows(5, range(3)), rows[5])
    # Runs of earlier versions resume with the same images.
    digits = EpochSampler(1437, 32, seed=0).rows(100, range(2))
    assert digits[:, :3].tolist() == [[697, 100, 771], [370, 205, 1329]]
    assert parts(1437, 4, seed=0)[:, 0].tolist() == [960, 888, 398, 1225]
    with pytest.raises(ValueError, match="must be at most 3, .* got batch_size=4"):
        EpochSampler(size=3, batch_size=4, seed=0)


def test_a_batch_holds_random_crops_of_the_sampled_images(folder):
    files = imagenet.load(folder).train
    sampler = EpochSampler(24, BATCH, SEED)
    for step, batch in zip((9, 10), take(make_stream(folder), 9, 11)):
        pixels, labels, valid = batch
        assert pixels.shape == (4, BATCH, SIZE, SIZE, 3) and pixels.dtype == np.uint8
        assert labels.dtype == np.int32 and valid.all()
        rows = sampler.rows(step, range(4))
        np.testing.assert_array_equal(labels, files.labels[rows])
        for (worker, place), row in np.ndenumerate(rows):
            expected = cropped(files.path(row), worker, step, place)
            np.testing.assert_array_equal(pixels[worker, place], expected)


def test_reading_starts_at_any_step_and_continues_over_epochs(folder):
    reader = make_stream(folder)
    whole = take(reader, 0, 20)
    assert_equal(take(reader, 7, 20), whole[7:])
    assert_equal(take(make_stream(folder, ahead=5), 16, 18), whole[16:18])
    assert take(reader, 20, 20) == []
    seen = np.sort(np.concatenate([labels for _, labels, _ in whole[:8]], axis=1))
    assert (seen == np.repeat([0, 1, 2], 8)).all()


def test_a_process_reads_only_the_images_of_its_workers(folder, read):
    whole = take(make_stream(folder), 3, 6)
    first, rest = make_stream(folder, Grid(0, 1)), make_stream(folder, Grid(1, 4))
    read.clear()
    both = take(first, 3, 6), take(rest, 3, 6)
    assert_equal(jax.tree.map(lambda *x: np.concatenate(x), *both), whole)
    assert len(read) == 3 * 4 * BATCH


def test_each_test_image_is_read_once_and_padding_does_not_count(folder):
    reader, files = make_stream(folder), imagenet.load(folder).test
    for _ in range(2):  # images are read again
        batches = list(reader.test_batches)
        assert [pixels.shape for pixels, *_ in batches] == [(4, 2, SIZE, SIZE, 3)] * 2
        together = [np.concatenate(x) for x in zip(*batches)]
        pixels, labels, valid = (x.reshape(16, *x.shape[2:]) for x in together)
        assert valid.tolist() == [True] * 9 + [False] * 7
        np.testing.assert_array_equal(labels[:9], files.labels)
        for row in range(9):
            expected = imagenet.read(files.path(row), SIZE, imagenet.center_box)
            np.testing.assert_array_equal(pixels[row], expected)
    mine = list(make_stream(folder, Grid(2, 4)).test_batches)
    assert_equal(mine, jax.tree.map(lambda x: x[2:], batches))


# Unreadable files


def test_the_next_readable_image_replaces_a_broken_one(copied, brief):
    good = take(make_stream(copied), 0, 8)
    cats, said = copied / "train" / "cat", []
    broken = [copied / "train" / "bee" / f"{i}.JPEG" for i in (2, 3)] + [cats / "7.JPEG"]
    broken[0].write_bytes(b"no image")
    broken[1].write_bytes(broken[1].read_bytes()[:700])
    broken[2].unlink()
    broken[2].symlink_to("nowhere")
    reader = make_stream(copied, warn=said.append)
    got = take(reader, 0, 8)
    assert_equal(take(reader, 5, 8), got[5:])  # broken ones are known now
    assert_equal(take(make_stream(copied, warn=lambda text: None), 5, 8), got[5:])
    reasons = dict(line.split(" is left out, it cannot be read: ") for line in said)
    assert len(said) == 3 and reasons.keys() == set(map(str, broken))
    assert reasons[str(broken[0])] == "it is no JPEG, PNG, BMP, WebP, GIF or TIFF image"
    assert "truncated" in reasons[str(broken[1])]
    assert reasons[str(broken[2])] == "No such file or directory"

    files, sampler = imagenet.load(copied).train, EpochSampler(24, BATCH, SEED)
    replaced = {10: 12, 11: 12, 23: 0}  # the first image follows the last one
    for step in range(8):
        pixels, labels = good[step][0].copy(), good[step][1].copy()
        for (worker, place), row in np.ndenumerate(sampler.rows(step, range(4))):
            if row in replaced:
                path = files.path(replaced[row])
                pixels[worker, place] = cropped(path, worker, step, place)
                labels[worker, place] = files.labels[replaced[row]]
        assert_equal(got[step], (pixels, labels, good[step][2]))


def test_a_broken_image_is_replaced_by_one_of_the_same_worker(copied, read):
    (copied / "train" / "cat" / "7.JPEG").write_bytes(b"")
    own, said = parts(24, 4, SEED), []
    worker, place = np.argwhere(own == 23)[0]
    following = own[worker][(place + 1) % 6]
    grid = Grid(worker, worker + 1)
    reader = make_stream(copied, grid, shard=True, warn=said.append)
    read.clear()
    take(reader, 0, 2)
    files = imagenet.load(copied).train
    assert sorted(read) == sorted(files.path(row) for row in [*own[worker], following])
    assert len(said) == 1


def test_the_number_of_reported_files_is_limited(copied, monkeypatch):
    monkeypatch.setattr(stream, "MOST_NAMED", 3)
    for path in (copied / "train" / "ant").iterdir():
        path.write_bytes(b"")
    said = []
    take(make_stream(copied, warn=said.append), 0, 8)
    assert len(said) == 4 and "they are not listed" in said[-1]


def test_reading_fails_when_all_files_are_gone(copied, monkeypatch, brief):
    monkeypatch.setattr(stream, "MOST_SKIPPED", 5)
    reader = make_stream(copied, warn=lambda text: None)
    with contextlib.closing(reader.batches(range(100))) as batches:
        next(batches)
        shutil.rmtree(copied)
        with pytest.raises(DataError, match="5 images in a row cannot be read, .*No such"):
            list(batches)
    with pytest.raises(DataError, match="5 images in a row cannot be read"):
        list(reader.test_batches)  # which would count no image


def unmounted(copied):
    """The folder is gone; returns a function that brings it back."""
    away = copied.rename(copied.with_name("away"))
    return lambda: away.rename(copied)


def failing(copied):
    """All reads fail; returns a function as above."""
    away = Mock(side_effect=OSError(errno.ESTALE, "Stale file handle", "a.jpeg"))
    patch = pytest.MonkeyPatch()
    patch.setattr(imagenet, "read", away)
    return patch.undo


@pytest.mark.slow
@pytest.mark.parametrize("go_away", [unmounted, failing])
def test_data_that_are_away_for_a_moment_lose_no_image(copied, monkeypatch, go_away):
    monkeypatch.setattr(imagenet, "WAITS", (0.05, 0.1, 5, 5))
    said = []
    reader = make_stream(copied, warn=said.append)
    reads = {
        "training": lambda: take(reader, 0, 3),
        "test": lambda: list(reader.test_batches),
    }
    for name in ("training", "test", "training"):
        expected = reads[name]()
        come_back = threading.Timer(0.1, go_away(copied))
        come_back.start()
        assert_equal(reads[name](), expected)
        come_back.join()
    assert 0 < len(said) <= 3
    for line in said:
        assert re.search("at the moment: (Stale file|No such file).*; trying again", line)


def test_a_file_that_is_away_alone_is_left_out_until_it_is_back(copied, brief):
    good = take(make_stream(copied), 0, 8), list(make_stream(copied).test_batches)
    said = []
    reader = make_stream(copied, warn=said.append)
    away = [path.rename(f"{path}.away") for path in copied.glob("*/bee/1.JPEG")]
    lost = take(reader, 0, 8), list(reader.test_batches)
    assert [int(valid.sum()) for _, _, valid in lost[1]] == [7, 1]
    assert any(np.any(a[0] != b[0]) for a, b in zip(lost[0], good[0]))
    assert len(said) == 2 and all("1.JPEG is left out, it cannot" in line for line in said)
    for path in away:
        path.rename(path.with_suffix(""))
    assert_equal(take(reader, 0, 8), good[0])
    assert_equal(list(reader.test_batches), good[1])


def test_waiting_for_many_files_that_stay_away_is_bounded(copied, monkeypatch):
    """Wrong permissions of half of the files, say."""
    monkeypatch.setattr(stream, "MOST_AWAY", 3)
    reader, waits = make_stream(copied, warn=lambda text: None), []
    original = imagenet.read

    def read(path, *rest):
        if int(path[-6]) % 2:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return original(path, *rest)

    monkeypatch.setattr(imagenet, "read", read)
    monkeypatch.setattr(
        reader, "_pause", lambda ended, seconds, error: waits.append(seconds)
    )
    take(reader, 0, 8)
    full, threads = sum(imagenet.WAITS), THREADS
    assert 3 * full <= sum(waits) <= (3 + threads) * full + 12


def test_closing_does_not_wait_for_files_that_are_away(copied, monkeypatch):
    monkeypatch.setattr(imagenet, "WAITS", (60.0,))
    batches = make_stream(copied).batches(range(100))
    next(batches)
    come_back = failing(copied)
    time.sleep(0.2)  # in which the threads begin to wait
    began = time.monotonic()
    batches.close()
    come_back()
    assert time.monotonic() - began < 10


def test_a_memory_error_is_not_blamed_on_the_files(folder, monkeypatch):
    reader, full = make_stream(folder), MemoryError("no room for an image")
    monkeypatch.setattr(imagenet, "read", Mock(side_effect=full))
    with pytest.raises(MemoryError, match="no room for an image"):
        take(reader, 0, 1)


# Bounds and the end


@pytest.mark.slow
def test_reading_ahead_is_bounded(folder, read):
    reader = make_stream(folder, ahead=3)
    read.clear()

    def check(expected):
        until(lambda: len(read) >= expected, seconds=10)
        time.sleep(0.3)  # in which no more images are read
        assert len(read) == expected

    with contextlib.closing(reader.batches(range(50))) as batches:
        check(0)
        for taken in (1, 2, 3):
            next(batches)
            # Two more batches are on the devices, and three are decoded.
            check((taken + 2 + 3) * 4 * BATCH)
        assert 0 < len(readers()) <= THREADS + 1


def test_closing_stops_the_threads_at_any_time(folder):
    reader = make_stream(folder, ahead=50)
    for steps in (0, 1, 3):
        batches = reader.batches(range(10**9))
        for _ in range(steps):
            next(batches)
        batches.close()
        with pytest.raises(StopIteration):
            next(batches)
    for batch in reader.test_batches:
        assert len(batch) == 3
        break  # an abandoned iterator is closed, too


def test_a_process_reads_with_the_cores_that_it_may_use(monkeypatch):
    """A batch system or a container gives it some of those of the host."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert images._cores() == 2


def test_the_number_of_steps_in_flight_is_bounded():
    class Result:
        done = False

        def block_until_ready(self):
            self.done = True

    backlog = Backlog(2)
    results = [backlog.add(Result()) for _ in range(5)]
    assert [result.done for result in results] == [True] * 3 + [False] * 2
