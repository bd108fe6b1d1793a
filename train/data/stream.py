"""Batches of images that are read from files ahead of the step that needs them."""

import concurrent.futures
import functools
import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax import Array
from PIL import UnidentifiedImageError

import lsgd_jax as lj
from train.data import imagenet
from train.data.arrays import DataError
from train.data.imagenet import Files, ImageFolder
from train.data.sampler import EpochSampler, test_rows
from train.process.messages import counted


CROPS = 1  # separates the seeds of crops from those of the order
MOST_SKIPPED = 100  # unreadable files in a row; with more, the cause is not the files
MOST_NAMED = 100  # unreadable files to report
MOST_AWAY = 16  # files for each of which reading waits a minute

Batch = tuple[Array, Array, Array]
Image = tuple[np.ndarray, np.int32, np.bool]  # uint8 [size, size, 3], label, if valid
Pause = Callable[[float, OSError], object]  # waits for these seconds after an error


class Stream:
    """A source that reads and decodes images in threads of grain, a few batches ahead.

    The image at (step, worker, place in the batch) and its crop depend only on these
    numbers and the seed. A run therefore resumes at any step, in any number of processes,
    and a checkpoint only has to hold the step. Each process reads the images of its own
    workers.

    A training image that cannot be decoded is replaced by the next readable one, which
    usually belongs to the same class. Such a test image does not count. Each of them is
    reported once and not read again.

    Where the system cannot give a file, reading waits for about a minute. A file that it
    still cannot give is left out as above if it gives others, and is tried again whenever
    its turn comes.

    At most ahead + 3 unused batches are in memory; two of them are on the devices.

    Args:
      folder: the images.
      sampler, workers, parts, test_batch: see `Resident`.
      seed: seed of the random crops.
      threads: number of threads that read.
      ahead: number of batches to read ahead.
      warn: called with a message for each unreadable file, and when reading waits.

    Attributes:
      data: (), because nothing stays on the devices.
      steps_per_epoch: number of steps in which a worker sees its examples once.
      most_in_flight: number of steps that may be in flight; each keeps its batch.

    Raises:
      DataError: no image can be read.
    """

    data = ()
    most_in_flight = 2

    def __init__(
        self,
        folder: ImageFolder,
        sampler: EpochSampler,
        workers: lj.Workers,
        parts: np.ndarray | None,
        test_batch: int,
        *,
        seed: int,
        threads: int,
        ahead: int,
        warn: Callable[[str], None],
    ):
        self._folder = folder
        self._sampler = sampler
        self._workers = workers
        self.steps_per_epoch = sampler.steps_per_epoch
        self._parts = parts
        self._seed = seed
        self._threads = threads
        self._ahead = ahead
        self._warn = warn
        self._lock = threading.Lock()
        self._broken: set[str] = set()  # files that cannot be decoded
        self._away: set[str] = set()  # files that the system could not give for a minute
        self._reasons: dict[str, str] = {}  # for which files were left out, by path
        self._reported = 0  # how many of them
        self._is_waiting = False
        for files in (folder.train, folder.test):
            if files.left_out:
                warn(imagenet.describe_left_out(files.left_out))
        count = len(folder.test.labels)
        self._test_rows = test_rows(count, workers, test_batch)
        for files in (folder.train, folder.test):
            rows = range(len(files.labels))
            pause = functools.partial(self._pause, threading.Event())
            self._first_readable(files, rows, imagenet.center_box, pause)

    def batches(self, steps: range) -> Generator[Batch, None, None]:
        """Yields the batch of each step (from 0): (images, labels, all true) [W, B, ...].

        Reading begins with the first request. It ends with the last batch, or when the
        generator is closed.
        """
        shape = len(self._workers.owned), self._sampler.batch_size
        return self._read(self._training_image, steps, shape)

    @property
    def test_batches(self) -> Generator[Batch, None, None]:
        """All test images, read again on each use: (images, labels, counts) [W, b, ...]."""
        batches, *shape = self._test_rows.shape
        return self._read(self._test_image, range(batches), tuple(shape))

    def center_crops(self, files: Files) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reads files now: (images, labels, all true), in host memory.

        A file that cannot be read is replaced by the next readable one.
        """
        count = len(files.labels)
        pause = functools.partial(self._pause, threading.Event())

        def read(row: int) -> Image:
            rows = itertools.chain(range(row, count), range(row))
            return self._first_readable(files, rows, imagenet.center_box, pause)

        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            images, labels, counts = zip(*pool.map(read, range(count)))
        return np.stack(images), np.stack(labels), np.stack(counts)

    @staticmethod
    def examples(data: Any, batch: Batch) -> tuple[Array, Array]:
        """One worker's images and labels: uint8 [B, size, size, 3] and int32 [B]."""
        images, labels, _ = batch  # all images count
        return images, labels

    # From a position to an image, in the threads

    def _training_image(self, pause: Pause, step: int, index: int, place: int) -> Image:
        """Reads the image at a place in the batch of an owned worker."""
        owned = self._workers.owned
        files = self._folder.train
        with self._lock:  # one thread computes the orders of an epoch while others wait
            row = int(self._sampler.rows(step, owned)[index, place])
        seed = [self._seed, owned[index], step, place, CROPS]

        def box(width: int, height: int) -> imagenet.Box:
            return imagenet.random_box(width, height, np.random.default_rng(seed))

        all_rows = range(len(files.labels))
        own = all_rows if self._parts is None else self._parts[owned[index]]
        following = (int(own[(row + i) % len(own)]) for i in range(len(own)))
        return self._first_readable(files, following, box, pause)

    def _test_image(self, pause: Pause, batch: int, index: int, place: int) -> Image:
        files = self._folder.test
        row = int(self._test_rows[batch, index, place])
        label = np.int32(0)
        pixels = None
        if row < len(files.labels):
            label = files.labels[row]
            pixels = self._try(files, row, imagenet.center_box, pause, self._waits())
        if pixels is not None:
            return pixels, label, np.True_
        if row < len(files.labels) and files.path(row) in self._away:
            # A test without all of its files would be wrong: are the others there?
            rows = itertools.chain(range(row, len(files.labels)), range(row))
            self._first_readable(files, rows, imagenet.center_box, pause, iter(()))
        return np.zeros(self._folder.image_shape, np.uint8), label, np.False_

    def _first_readable(
        self,
        files: Files,
        rows: Iterable[int],
        box_of: Callable,
        pause: Pause,
        waits: Iterator[float] | None = None,
    ) -> Image:
        """Reads the first readable image. The waits are those for all of them together.

        Raises:
          DataError: the first hundred images are unreadable.
        """
        tried = []
        left = self._waits() if waits is None else waits
        for row in itertools.islice(rows, MOST_SKIPPED):
            pixels = self._try(files, row, box_of, pause, left)
            if pixels is not None:
                return pixels, files.labels[row], np.True_
            tried.append(files.path(row))
        last = tried[-1]
        raise DataError(
            f"{counted(len(tried), 'image')} in a row cannot be read, the last {last}: "
            f"{self._reasons[last]}"
        )

    def _waits(self) -> Iterator[float]:
        """The seconds to wait for a file, or for a row of them.

        Where many files stayed away although others were there, as with wrong permissions,
        waiting for each of the rest would take hours.
        """
        are_many = len(self._away) >= MOST_AWAY
        return iter(imagenet.WAITS[:1] if are_many else imagenet.WAITS)

    def _try(
        self,
        files: Files,
        row: int,
        box_of: Callable,
        pause: Pause,
        waits: Iterator[float],
    ) -> np.ndarray | None:
        """Reads the crop of an image; returns None if it is unreadable."""
        path = files.path(row)
        if path in self._broken:
            return None
        if path in self._away:
            waits = iter(())
        size = self._folder.image_size
        try:
            pixels = imagenet.patiently(path, size, box_of, waits, pause)
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises many types
            group = self._away if imagenet.is_of_the_system(error) else self._broken
            group.add(path)
            self._reasons[path] = _reason(error)
            return None
        self._away.discard(path)
        self._is_waiting = False
        return pixels

    def _pause(self, ended: threading.Event, seconds: float, error: OSError) -> None:
        """Waits before another attempt, and says so once until an image is read again."""
        is_first = False
        if seconds > imagenet.WAITS[0]:  # a shorter moment needs no words
            with self._lock:
                is_first = not self._is_waiting
                self._is_waiting = True
        if is_first and not ended.is_set():
            reason = _reason(error)
            self._warn(
                f"{error.filename} cannot be read at the moment: {reason}; trying again "
                "for about a minute"
            )
        ended.wait(seconds)

    # From images to batches on the devices

    def _read(
        self, image: Callable[..., Image], batches: range, shape: tuple[int, ...]
    ) -> Generator[Batch, None, None]:
        """Reads batches ahead and puts them on the devices: (pixels, labels, valid).

        Args:
          image: reads the image at (pause, batch, index of an owned worker, place).
          batches: the batches to read.
          shape: the part of a batch that this process reads, [owned workers, b].
        """
        import grain  # takes half a second, which other data sets do not need

        size = math.prod(shape)
        ended = threading.Event()
        pause = functools.partial(self._pause, ended)

        def at(position: int) -> Image:
            batch, rest = divmod(position, size)
            return image(pause, batch, *divmod(rest, shape[-1]))

        def place(batch: Any) -> Batch:

            def of_shape(x):
                return x.reshape(*shape, *x.shape[1:])

            return self._workers.put_owned(jax.tree.map(of_shape, batch))

        read_ahead = grain.ReadOptions(
            self._threads, prefetch_buffer_size=max(self._ahead * size, self._threads)
        )
        images = grain.MapDataset.range(batches.start * size, batches.stop * size).map(at)
        placed = images.to_iter_dataset(read_ahead).batch(size).map(place)
        # A separate thread copies to the devices; it holds one batch besides its buffer.
        buffered = grain.experimental.ThreadPrefetchIterDataset(
            placed, prefetch_buffer_size=1
        )
        reading = iter(buffered)
        try:
            for batch in reading:
                self._report()
                yield batch
        finally:
            ended.set()  # closing waits for the threads
            reading.close()

    def _report(self) -> None:
        """Warns of files that were found to be unreadable since the last report."""
        paths = list(self._reasons)
        begin = self._reported
        for path in paths[begin:MOST_NAMED]:
            self._warn(f"{path} is left out, it cannot be read: {self._reasons[path]}")
        if begin <= MOST_NAMED < len(paths):
            self._warn("more images cannot be read; they are not listed")
        self._reported = len(paths)


def _reason(error: Exception) -> str:
    """Why an image cannot be read, without its path.

    >>> _reason(OSError(5, "Input/output error", "a.jpeg")), _reason(ValueError())
    ('Input/output error', 'ValueError()')
    """
    if isinstance(error, UnidentifiedImageError):
        return f"it is no {imagenet.KINDS} image"
    return getattr(error, "strerror", None) or str(error) or repr(error)
