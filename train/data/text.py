"""Text as token ids in the host's memory; the last tenth is for validation."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from train.data import standard_library
from train.data.arrays import DataError
from train.data.vocabulary import Tokens, Vocabulary


@dataclasses.dataclass(frozen=True)
class Text:
    """What to train on and what to test with.

    Attributes:
      train, test: token ids, unsigned [N].
      vocabulary: what the ids stand for.
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
    if not files:
        return of(standard_library.source(), tokens)
    return of(b"".join(_read(file, tokens) for file in files), tokens)


def of(text: bytes, tokens: Tokens) -> Text:
    """A text: the first nine tenths of its tokens are for training."""
    # Of the whole text, so that the validation has no character without an id.
    vocabulary = Vocabulary.of(text, tokens)
    ids = vocabulary.encode(text)
    count = len(ids) * 9 // 10
    return Text(ids[:count], ids[count:], vocabulary, hashlib.sha256(text).hexdigest())


def _read(file: str, tokens: Tokens) -> bytes:
    try:
        with open(file, "rb") as opened:
            text = opened.read()
    except OSError as error:
        raise DataError(
            f"`data.files` must name files of text, but {file} cannot be read: "
            f"{error.strerror or error}"
        ) from error
    if not text:
        raise DataError(f"`data.files` must name files of text, but {file} is empty")
    if tokens == "characters":
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} is not UTF-8 text (the byte at {error.start:,} is "
                f"0x{text[error.start]:02x}); --data.tokens bytes takes any file"
            ) from None
    return text
