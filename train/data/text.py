"""Text as token ids, of which workers learn random windows on the devices."""

import codecs
import dataclasses
import functools
import hashlib
import json
import pathlib
import sysconfig
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import lsgd_jax as lj
from train.data.arrays import DataError
from train.data.sampler import rows_in_batches


Tokens = Literal["characters", "bytes"]

CODE_POINTS = 0x110000  # of Unicode
LIBRARY_BYTES = 2_000_000
TEST_TOKENS = 2**14  # per worker and batch


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens that ids stand for.

    Attributes:
      characters: those of the text in the order of their code points; None: the 256 bytes.

    >>> Vocabulary("ehlo").decode(np.array([1, 3, 2, 0]))
    'hole'
    """

    characters: str | None

    def __len__(self) -> int:
        return 256 if self.characters is None else len(self.characters)

    def decode(self, ids: np.ndarray) -> str:
        """The text of some ids; bytes that are not UTF-8 become the sign U+FFFD."""
        if self.characters is None:
            return bytes(ids.astype(np.uint8)).decode(errors="replace")
        return "".join(self.characters[i] for i in ids)

    @property
    def start(self) -> np.ndarray:
        """The token before a sample, [1]: the end of a line if there is one, or id 0."""
        found = ord("\n") if self.characters is None else self.characters.find("\n")
        return np.array([max(found, 0)], np.uint8)

    @property
    def nbytes(self) -> np.ndarray:
        """The bytes of each token in UTF-8, int32 [V]."""
        if self.characters is None:
            return np.ones(256, np.int32)
        return np.array([len(c.encode()) for c in self.characters], np.int32)

    def to_json(self, **notes: str) -> str:
        """The vocabulary as JSON, with notes beside it."""
        return json.dumps({"characters": self.characters, **notes}) + "\n"


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in the host's memory.

    Attributes:
      train, test: token ids, unsigned [N]: the first nine tenths, and the last.
      vocabulary: the tokens of the ids.
      sha256: of the bytes of the whole text, in hexadecimal.

    >>> text = of(b"to be or not to be, that is the question", "characters")
    >>> len(text.train), len(text.test), len(text.vocabulary)
    (36, 4, 14)
    """

    train: np.ndarray
    test: np.ndarray
    vocabulary: Vocabulary
    sha256: str


def load(files: Sequence[str], tokens: Tokens) -> Text:
    """The files one after the other; without any, the source of the standard library.

    Raises:
      DataError: a file that cannot be read, is empty, or is not UTF-8 if characters are
        wanted.
    """
    texts = [_read(file, tokens) for file in files] or [standard_library()]
    return of(b"".join(texts), tokens)


def of(text: bytes, tokens: Tokens) -> Text:
    """A text in UTF-8, or in bytes of any kind: nine tenths of its tokens are for training.

    Ids are of the smallest unsigned type that holds them.
    """
    characters, ids = None, np.frombuffer(text, np.uint8)
    if tokens == "characters":
        points = np.frombuffer(text.decode().encode("utf-32-le"), np.uint32)
        # Those of the whole text, so that no character of the test lacks an id.
        present = np.zeros(CODE_POINTS, bool)
        present[points] = True
        characters = "".join(map(chr, np.flatnonzero(present)))
        smallest = np.min_scalar_type(len(characters) - 1)
        ids = (np.cumsum(present) - 1).astype(smallest)[points]
    count, sha256 = len(ids) * 9 // 10, hashlib.sha256(text).hexdigest()
    return Text(ids[:count], ids[count:], Vocabulary(characters), sha256)


def standard_library() -> bytes:
    """A text that every machine has: Python's own modules in the order of their names.

    It ends after 2 MB. Packages and files generated when Python was built are left out, so
    that the same Python gives the same text.
    """
    folder, text = pathlib.Path(sysconfig.get_path("stdlib")), b""
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        if len(text) < LIBRARY_BYTES and not path.name.startswith("_sysconfig"):
            text += path.read_bytes()
    # A character of several bytes is not cut.
    return text[:LIBRARY_BYTES].decode(errors="ignore").encode()


def _read(file: str, tokens: Tokens) -> bytes:
    path, text, wrong = pathlib.Path(file), b"", ""
    try:
        if path.exists() and not path.is_file():
            wrong = "is no regular file"  # reading a FIFO would wait for its other end
        else:
            text = path.read_bytes()
            wrong = "" if text.removeprefix(codecs.BOM_UTF8) else "is empty"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror or error}"
    if wrong:
        raise DataError(f"`data.files` must name files of text, but {file} {wrong}")
    if tokens == "characters":
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} is not UTF-8 text (the byte at {error.start:,} is "
                f"0x{text[error.start]:02x}); --data.tokens bytes takes any file"
            ) from None
        text = text.removeprefix(codecs.BOM_UTF8)
    return text


class Windows:
    """All of the text lies on the devices; workers draw from it inside their steps.

    Args:
      text: the token ids.
      context: T, how many tokens are seen at once.
      batch_size: B, windows per worker and step.
      workers: the grid.
      shard: whether each worker has a part of the training text of its own.

    Attributes:
      size: tokens of each worker's training text.
      data: the training text on the devices: of each worker its own part, or in a `Shared`
        all of it.
      test_batches: (windows [W, b, T + 1], whether a prediction counts [W, b, T]): every
        token of the validation text but the first is predicted once.
      most_in_flight: steps that may wait for a device.

    Raises:
      DataError: a text that is too short, or of one and the same token.
    """

    most_in_flight = 4

    def __init__(
        self, text: Text, context: int, batch_size: int, workers: lj.Workers, shard: bool
    ):
        self._context, self._batch_size, self._workers = context, batch_size, workers
        self.size = size = len(text.train) // (workers.num_workers if shard else 1)
        _check(text, size, context, shard)
        if shard:
            parts = text.train[: size * workers.num_workers].reshape(-1, size)
            self.data = workers.put_owned(parts[list(workers.owned)])
        else:
            self.data = workers.share(text.train)
        self._test = text.test

    @functools.cached_property
    def test_batches(self) -> list[Any]:
        """Placed when they are first asked for: not all processes test."""
        return list(self._in_batches(self._test))

    def _in_batches(self, ids: np.ndarray) -> Iterator[Any]:
        """Windows one after the other, each from the last token of the one before."""
        workers, length, last = self._workers, self._context, len(ids) - 1
        count, most = -(-last // length), max(1, TEST_TOKENS // length)
        for rows in rows_in_batches(count, workers.num_workers, most):
            places = rows[list(workers.owned), :, None] * length + np.arange(length + 1)
            batch = ids[np.minimum(places, last)], places[..., 1:] <= last
            yield workers.put_owned(batch)

    @staticmethod
    def batches(steps: range) -> Generator[tuple[()], None, None]:
        """Nothing for each step: workers draw their windows themselves."""
        for _ in steps:
            yield ()

    def draw(self, data: Any, key: Array) -> Array:
        """One worker's random windows: (its data, key) -> int32 [B, T + 1]."""
        ids = data.value if isinstance(data, lj.Shared) else data
        last = len(ids) - self._context - 1
        starts = jax.random.randint(key, (self._batch_size,), 0, last + 1)
        places = starts[:, None] + jnp.arange(self._context + 1)[None]
        return ids[places].astype(jnp.int32)


def _check(text: Text, size: int, context: int, shard: bool) -> None:
    whose = "each worker's part of the training text" if shard else "the training text"
    needed = context + 1
    if size < needed:
        raise DataError(
            f"{whose}, the first nine tenths, must have at least {needed:,} tokens (one "
            f"more than data.context), got {size:,}"
        )
    if len(text.test) < 2:
        raise DataError("the validation text, the last tenth, must have at least 2 tokens")
    if len(text.train) >= 2**31:
        raise DataError(f"the text must have less than 2**31 tokens, got {len(text.train)}")
    if len(text.vocabulary) < 2:
        raise DataError("the text must have at least 2 different characters, got 1")
