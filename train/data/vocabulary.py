"""From text to token ids and back."""

import dataclasses
import json
from typing import Literal

import numpy as np


Tokens = Literal["characters", "bytes"]

CODE_POINTS = 0x110000  # of Unicode


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    r"""What tokens there are.

    Attributes:
      characters: those of the text in the order of their code points; None: the 256 bytes.

    >>> letters = Vocabulary.of(b"hello", "characters")
    >>> letters.encode(b"hole").tolist(), letters.decode(letters.encode(b"hole"))
    ([1, 3, 2, 0], 'hole')
    >>> Vocabulary.of(b"", "bytes").encode("é".encode()).tolist()
    [195, 169]
    """

    characters: str | None

    @classmethod
    def of(cls, text: bytes, tokens: Tokens) -> "Vocabulary":
        """The vocabulary of a text in UTF-8, or in bytes of any kind."""
        if tokens == "bytes":
            return cls(None)
        return cls("".join(map(chr, np.unique(_code_points(text)))))

    def __len__(self) -> int:
        return 256 if self.characters is None else len(self.characters)

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of a text, in the smallest unsigned type that holds them.

        Raises:
          ValueError: a character that is not in the vocabulary.
        """
        if self.characters is None:
            return np.frombuffer(text, np.uint8)
        table = np.full(CODE_POINTS, -1, np.int32)
        table[[ord(character) for character in self.characters]] = np.arange(len(self))
        points = _code_points(text)
        ids = table[points]
        if (ids < 0).any():
            unknown = chr(points[ids < 0][0])
            raise ValueError(f"the character {unknown!r} is not in the vocabulary")
        return ids.astype(np.min_scalar_type(len(self) - 1))

    def decode(self, ids: np.ndarray) -> str:
        """The text of some ids; bytes that are not UTF-8 become the sign U+FFFD."""
        if self.characters is None:
            return bytes(ids.astype(np.uint8)).decode(errors="replace")
        return "".join(self.characters[i] for i in ids)

    @property
    def start(self) -> np.ndarray:
        """What a sample begins behind, [1]: the end of a line, or else the first token."""
        has_lines = self.characters is None or "\n" in self.characters
        return self.encode(b"\n") if has_lines else np.zeros(1, np.uint8)

    @property
    def nbytes(self) -> np.ndarray:
        """The bytes of each token in UTF-8, int32 [V]."""
        if self.characters is None:
            return np.ones(256, np.int32)
        return np.array([len(c.encode()) for c in self.characters], np.int32)

    def to_json(self, **notes: str) -> str:
        """What `from_json` reads, with notes beside it."""
        return json.dumps({"characters": self.characters, **notes}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """The vocabulary that `to_json` wrote.

        >>> Vocabulary.from_json(Vocabulary("ab").to_json()).characters
        'ab'
        """
        return cls(json.loads(text)["characters"])


def _code_points(text: bytes) -> np.ndarray:
    return np.frombuffer(text.decode().encode("utf-32-le"), np.uint32)
