"""Data that stay in files and are read ahead of the step that needs them."""

import functools
import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from PIL import UnidentifiedImageError

import lsgd_jax as lj
from train.data import decode
from train.data.arrays import DataError
from train.data.imagenet import Files, ImageFolder
from train.data.sampler import EpochSampler, rows_in_batches


CROPS = 1  # separates the seeds of crops from those of the order
MOST_SKIPPED = 100  # files in a row; after these it is not the files that are broken
MOST_NAMED = 100  # files named on the screen


Batch = tuple[Array, Array, Array]


class Image(NamedTuple):
    """What has been read for one place in a batch.

    Attributes:
      pixels: uint8 [size, size, 3].
      label: int32.
      valid: whether it counts.
      skipped: the files that had to be passed over.
    """

    pixels: np.ndarray
    label: np.int32
    valid: bool
    skipped: list[str]


class Stream:
    """Images are read and decoded by threads, a few batches ahead.

    Which image stands at (step, worker, place in the batch), and which part of it is taken,
    depend only on these and the seed. So a run resumes at step k by reading from there, in
    any number of processes: the step is all that a checkpoint must hold. Each process reads
    the images of its own workers.

    A training image that cannot be read is replaced by the next one that can be, which is
    of the same class as a rule; a test image that cannot be read does not count. Each
    such file is reported once.

    At most ahead + 3 batches are read and not yet handed out: `ahead` of them decoded or
    being decoded, one being put together, two on the devices.

    Args:
      folder: the images.
      sampler: which images each worker sees at which step.
      workers: the grid.
      parts: of the training images each worker's own, int [W, size]; None: all.
      test_batch: test images per worker and batch, at most.
      seed: of the random parts of images.
      threads: how many read.
      ahead: batches to read ahead.
      warn: called with a line for each file that cannot be read.
      same_everywhere: says whether every process has called it with the same text.

    Attributes:
      data: (); nothing lies on the devices for good.
      test_batches: (images, labels, whether it counts) [W, b, ...], of all test images;
        each iteration reads them anew.
      most_in_flight: steps that may wait for a device; each holds its batch.

    Raises:
      DataError: no image can be read, or the processes do not see the same files.
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
        same_everywhere: Callable[[str], bool] = lambda text: True,
    ):
        self._folder, self._sampler, self._workers = folder, sampler, workers
        self._parts, self._seed = parts, seed
        self._threads, self._ahead, self._warn = threads, ahead, warn
        self._lock = threading.Lock()
        self._unreadable: dict[str, str] = {}  # path: why
        self._named: set[str] = set()
        if not same_everywhere(folder.digest()):
            raise DataError("the images must be the same files for all processes")
        count = len(folder.test.labels)
        rows = rows_in_batches(count, workers.num_workers, test_batch)
        self._test_rows = rows[:, list(workers.owned)]
        self.test_batches = _Again(self._read_test_batches)
        for files in (folder.train, folder.test):
            self._first_readable(files, range(len(files.labels)), decode.center_box)

    def batches(self, steps: range) -> Generator[Batch, None, None]:
        """The batch of each step (from 0): (images, labels, all true), each [W, B, ...].

        Reading begins when the first one is asked for, and ends with the last one or when
        the iterator is closed.
        """
        shape = len(self._workers.owned), self._sampler.batch_size
        return self._read(self._training_image, steps, shape)

    @staticmethod
    def images_and_labels(data: Any, batch: Batch) -> tuple[Array, Array]:
        """One worker's images and labels: uint8 [B, size, size, 3] and int32 [B]."""
        images, labels, _ = batch  # they all count
        return images, labels

    def _read_test_batches(self) -> Generator[Batch, None, None]:
        batches, *shape = self._test_rows.shape
        return self._read(self._test_image, range(batches), tuple(shape))

    # From a position to an image: what the threads do

    def _training_image(self, position: int) -> Image:
        """position = (step * owned workers + which of them) * batch size + place."""
        owned, batch = self._workers.owned, self._sampler.batch_size
        position, place = divmod(position, batch)
        step, index = divmod(position, len(owned))
        with self._lock:  # one thread works out the orders of an epoch, the others wait
            row = int(self._sampler.rows(step, owned)[index, place])
        seed = [self._seed, owned[index], step, place, CROPS]

        def box(width: int, height: int) -> decode.Box:
            return decode.random_box(width, height, np.random.default_rng(seed))

        rows = self._rows_from(row, owned[index])
        return self._first_readable(self._folder.train, rows, box)

    def _rows_from(self, row: int, worker: int) -> Iterator[int]:
        """A worker's training images from one of them on, round to the one before it."""
        everything = range(len(self._folder.train.labels))
        mine = everything if self._parts is None else self._parts[worker]
        for i in range(row, row + len(mine)):
            yield int(mine[i % len(mine)])

    def _test_image(self, position: int) -> Image:
        """position = (batch * owned workers + which of them) * images of each + place."""
        files, row = self._folder.test, int(self._test_rows.flat[position])
        nothing = np.zeros(self._folder.image_shape, np.uint8)
        if row >= len(files.labels):
            return Image(nothing, np.int32(0), False, [])
        pixels = self._try(files, row, decode.center_box)
        if pixels is None:
            return Image(nothing, files.labels[row], False, [files.path(row)])
        return Image(pixels, files.labels[row], True, [])

    def _first_readable(self, files: Files, rows: Iterable[int], box_of: Callable) -> Image:
        """The first of the images that can be read.

        Raises:
          DataError: none of the first hundred can be.
        """
        skipped: list[str] = []
        for row in itertools.islice(rows, MOST_SKIPPED):
            pixels = self._try(files, row, box_of)
            if pixels is not None:
                return Image(pixels, files.labels[row], True, skipped)
            skipped.append(files.path(row))
        raise DataError(
            f"{len(skipped)} images in a row cannot be read, the last of them "
            f"{skipped[-1]}: {self._unreadable[skipped[-1]]}"
        )

    def _try(self, files: Files, row: int, box_of: Callable) -> np.ndarray | None:
        """The part of an image that is wanted, or None if it cannot be read."""
        path = files.path(row)
        if path in self._unreadable:
            return None
        try:
            return decode.read(path, self._folder.image_size, box_of)
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises all kinds
            self._unreadable[path] = _why(error)
            return None

    # From images to batches on the devices

    def _read(
        self, image: Callable[[int], Image], batches: range, shape: tuple[int, ...]
    ) -> Generator[Batch, None, None]:
        """The batches on the devices, read ahead: (pixels, labels, valid) [W, b, ...].

        Args:
          image: position -> image.
          batches: which batches.
          shape: of what this process reads of a batch, [owned workers, b].
        """
        import grain  # half a second that others need not wait for

        size = math.prod(shape)
        buffer = max(self._ahead * size, self._threads)
        positions = grain.MapDataset.range(batches.start * size, batches.stop * size)
        placed = (
            positions.map(image)
            .to_iter_dataset(grain.ReadOptions(self._threads, buffer))
            .batch(size, batch_fn=functools.partial(_gather, shape))
            .map(self._place)
        )
        # A thread of its own copies to the devices; it holds one batch beside its buffer.
        buffered = grain.experimental.ThreadPrefetchIterDataset(
            placed, prefetch_buffer_size=1
        )
        reading = iter(buffered)
        try:
            for batch, skipped in reading:
                self._report(skipped)
                yield batch
        finally:
            reading.close()

    def _place(self, gathered: tuple[Any, list[str]]) -> tuple[Any, list[str]]:
        batch, skipped = gathered
        return self._workers.put_owned(batch), skipped

    def _report(self, skipped: list[str]) -> None:
        """Names files that cannot be read, each once."""
        for path in skipped:
            if path in self._named or len(self._named) > MOST_NAMED:
                continue
            self._named.add(path)
            if len(self._named) <= MOST_NAMED:
                self._warn(
                    f"{path} is left out, it cannot be read: {self._unreadable[path]}"
                )
            else:
                self._warn("more images cannot be read; these are not named any more")


class _Again:
    """Begins anew with each iteration."""

    def __init__(self, begin: Callable[[], Iterator]):
        self._begin = begin

    def __iter__(self) -> Iterator:
        return self._begin()


def _gather(shape: tuple[int, ...], images: list[Image]) -> tuple[Any, list[str]]:
    """Images as arrays of a shape: ((pixels, labels, valid), the files passed over)."""
    pixels, labels, valid, skipped = zip(*images)
    batch = (
        np.stack(pixels).reshape(*shape, *pixels[0].shape),
        np.array(labels).reshape(shape),
        np.array(valid).reshape(shape),
    )
    return batch, list(itertools.chain.from_iterable(skipped))


def _why(error: Exception) -> str:
    """What is wrong with a file, without its name.

    >>> _why(FileNotFoundError(2, "No such file or directory", "a.jpeg"))
    'No such file or directory'
    """
    if isinstance(error, UnidentifiedImageError):
        return "it is no JPEG, PNG, BMP or WebP image"
    return getattr(error, "strerror", None) or str(error) or repr(error)
