"""Text as token ids, from which workers draw random windows on the devices."""

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
from train.data.sampler import test_rows


Tokens = Literal["characters", "bytes"]

CODE_POINTS = 0x110000  # of Unicode
LIBRARY_BYTES = 2_000_000
TEST_TOKENS = 2**14  # per worker and batch
# Tokens that are held out: a test of more would take as long as hundreds of steps, and
# these already give the loss to less than a hundredth of a nat.
MOST_TEST = 2**18


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens that ids stand for.

    Attributes:
      characters: the characters of the text in the order of their code points, or None if
        tokens are bytes.

    >>> Vocabulary("ehlo").decode(np.array([1, 3, 2, 0]))
    'hole'
    """

    characters: str | None

    def __len__(self) -> int:
        return 256 if self.characters is None else len(self.characters)

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        if self.characters is None:
            return bytes(ids.astype(np.uint8)).decode(errors="replace")
        return "".join(self.characters[i] for i in ids)

    def encode(self, text: str) -> np.ndarray:
        """The token ids of a text, int32 [N].

        Raises:
          ValueError: the vocabulary lacks a character.

        >>> Vocabulary("ehlo").encode("hole").tolist()
        [1, 3, 2, 0]
        """
        if self.characters is None:
            return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        missing = set(text) - set(self.characters)
        if missing:
            named = ", ".join(map(repr, sorted(missing)))
            raise ValueError(f"the vocabulary has {len(self)} characters, and not {named}")
        return np.array([self.characters.index(c) for c in text], np.int32)

    @property
    def start(self) -> np.ndarray:
        """The token before a sample, [1]: a line feed if there is one, otherwise id 0."""
        found = ord("\n") if self.characters is None else self.characters.find("\n")
        return np.array([max(found, 0)], np.uint8)

    @property
    def nbytes(self) -> np.ndarray:
        """The number of bytes of each token in UTF-8, int32 [V]."""
        if self.characters is None:
            return np.ones(256, np.int32)
        return np.array([len(c.encode()) for c in self.characters], np.int32)

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Inverts `to_json`. Raises ValueError for another text."""
        try:
            characters = json.loads(text)["characters"]
        except (KeyError, TypeError) as error:
            raise ValueError("it is no vocabulary") from error
        return cls(characters)

    def to_json(self, **notes: str) -> str:
        """The vocabulary as JSON, with additional notes."""
        return json.dumps({"characters": self.characters, **notes}) + "\n"


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in host memory.

    Attributes:
      train, test: token ids, unsigned [N]. The last tenth of the text, at most `MOST_TEST`
        tokens, is the test.
      vocabulary: the tokens that the ids stand for.
      sha256: hash of the bytes of the whole text, in hexadecimal.

    >>> text = of(b"to be or not to be, that is the question", "characters")
    >>> len(text.train), len(text.test), len(text.vocabulary)
    (36, 4, 14)
    """

    train: np.ndarray
    test: np.ndarray
    vocabulary: Vocabulary
    sha256: str


def load(files: Sequence[str], tokens: Tokens) -> Text:
    """Reads files and joins them. Without files, reads the standard library's source.

    If tokens are characters, a file that does not end with a line feed gets one before the
    next file, so that no two lines become one.

    Raises:
      DataError: a file cannot be read, is empty, or is not UTF-8 although the tokens are
        characters.
    """
    texts = [_read(file, tokens) for file in files] or [standard_library()]
    if tokens == "characters":
        texts[:-1] = [text.removesuffix(b"\n") + b"\n" for text in texts[:-1]]
    return of(b"".join(texts), tokens)


def of(text: bytes, tokens: Tokens) -> Text:
    """Splits a text, in UTF-8 or arbitrary bytes, into tokens for training and testing.

    Ids have the smallest unsigned type that holds them.
    """
    characters = None
    ids = np.frombuffer(text, np.uint8)
    if tokens == "characters":
        points = np.frombuffer(text.decode().encode("utf-32-le"), np.uint32)
        # The whole text counts, so that every character of the test has an id.
        present = np.zeros(CODE_POINTS, bool)
        present[points] = True
        characters = "".join(map(chr, np.flatnonzero(present)))
        smallest = np.min_scalar_type(len(characters) - 1)
        ids = (np.cumsum(present) - 1).astype(smallest)[points]
    count = max(len(ids) * 9 // 10, len(ids) - MOST_TEST)
    sha256 = hashlib.sha256(text).hexdigest()
    return Text(ids[:count], ids[count:], Vocabulary(characters), sha256)


def standard_library() -> bytes:
    """A text that every machine has: the modules of Python's library in alphabetical order.

    It ends after 2 MB. Packages and files that are generated when Python is built are left
    out, so that the same version of Python gives the same text.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    text = b""
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        if len(text) < LIBRARY_BYTES and not path.name.startswith("_sysconfig"):
            text += path.read_bytes()
    # A character of several bytes must not be cut.
    return text[:LIBRARY_BYTES].decode(errors="ignore").encode()


def _read(file: str, tokens: Tokens) -> bytes:
    text = read(file, "data.files")
    hint = "; --data.tokens bytes accepts any file"
    return decoded(file, text, hint).encode() if tokens == "characters" else text


def read(file: str, setting: str) -> bytes:
    """Reads a file that a setting names.

    Raises:
      DataError: the file cannot be read, or is empty.
    """
    path = pathlib.Path(file)
    text = b""
    wrong = ""
    try:
        if path.exists() and not path.is_file():
            wrong = "is no regular file"  # reading a FIFO would block
        else:
            text = path.read_bytes()
            wrong = "" if text.removeprefix(codecs.BOM_UTF8) else "is empty"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror or error}"
    if wrong:
        raise DataError(f"`{setting}` must name text files, but {file} {wrong}")
    return text


def decoded(file: str, text: bytes, hint: str = "") -> str:
    """The text of a file in UTF-8. Raises DataError, with the hint, if it is not UTF-8."""
    try:
        return text.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text (the byte at {error.start:,} is "
            f"0x{text[error.start]:02x}){hint}"
        ) from None


class Windows:
    """A source that keeps the text on the devices, where workers draw windows in a step.

    Args:
      text: the token ids.
      context: T, the maximum number of tokens that the model sees.
      batch_size: B, windows per worker and step.
      workers: the grid.
      shard: whether each worker has its own part of the training text.

    Attributes:
      size: number of tokens of each worker's training text.
      data: the training text on the devices: each worker's own part, or all of it in a
        `Shared`.
      test_batches: (windows [W, b, T + 1], whether a prediction counts [W, b, T]). Every
        token of the validation text except the first is predicted once.
      most_in_flight: number of steps that may be in flight.

    Raises:
      DataError: the text is too short, or consists of a single token.
    """

    most_in_flight = 4

    def __init__(
        self, text: Text, context: int, batch_size: int, workers: lj.Workers, shard: bool
    ):
        self._context = context
        self._batch_size = batch_size
        self._workers = workers
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
        """Placed on first use, because not all processes test."""
        return list(self._in_batches(self._test))

    def _in_batches(self, ids: np.ndarray) -> Iterator[Any]:
        """Consecutive windows, each of which starts with the last token of the previous."""
        length = self._context
        last = len(ids) - 1
        count = -(-last // length)
        most = max(1, TEST_TOKENS // length)
        for rows in test_rows(count, self._workers, most):
            places = rows[..., None] * length + np.arange(length + 1)
            batch = ids[np.minimum(places, last)], places[..., 1:] <= last
            yield self._workers.put_owned(batch)

    @staticmethod
    def batches(steps: range) -> Generator[tuple[()], None, None]:
        """Yields () for each step, because workers draw their windows themselves."""
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
            f"{whose}, nine tenths of the text, must have at least {needed:,} tokens (one "
            f"more than data.context), got {size:,}"
        )
    if len(text.test) < 2:
        raise DataError("the validation text, the last tenth, must have at least 2 tokens")
    if len(text.train) >= 2**31:
        raise DataError(f"the text must have less than 2**31 tokens, got {len(text.train)}")
    if len(text.vocabulary) < 2:
        raise DataError("the text must have at least 2 different characters, got 1")
