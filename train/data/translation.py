"""Sentences and their translations as padded token ids, in subwords of both languages."""

import base64
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from train.data import text
from train.data.arrays import DataError
from train.process.messages import is_installed


PAD, UNKNOWN, END = range(3)  # ids; END ends a sentence, and stands before its first token
MOST_TEST = 1000  # pairs that are held out
INSTALL = 'is not installed: pip install -e ".[translation]" in a checkout of lsgd_jax'


@dataclasses.dataclass(frozen=True)
class Subwords:
    """A vocabulary of subwords: a byte-pair encoding that SentencePiece has learned.

    Characters that it does not know become bytes, so that it encodes any text.

    Attributes:
      model: the model, in SentencePiece's format.

    Source: Kudo and Richardson, SentencePiece, EMNLP 2018.
    """

    model: bytes

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    @functools.cached_property
    def _processor(self) -> Any:
        return _sentencepiece().SentencePieceProcessor(model_proto=self.model)

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        """The ids of sentences, int32 [N, length].

        END follows each sentence, and PAD fills it up. Longer sentences are cut.
        """
        ids = np.full((len(texts), length), PAD, np.int32)
        for row, found in zip(ids, self.lists(texts)):
            found = found[:length]
            row[: len(found)] = found
        return ids

    def lists(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each sentence and END, as lists of different lengths."""
        return [[*ids, END] for ids in self._processor.encode(list(texts))]

    def decode(self, ids: np.ndarray) -> list[str]:
        """The sentences of ids [N, T], each up to its first END."""
        rows = (itertools.takewhile(lambda i: i != END, row) for row in ids.tolist())
        return self._processor.decode([list(row) for row in rows])

    @classmethod
    def learned(cls, texts: Iterable[str], size: int) -> "Subwords":
        """Learns at most `size` subwords from sentences.

        Raises:
          DataError: the size is too small for the characters of the sentences.
        """
        model = io.BytesIO()
        trainer = _sentencepiece().SentencePieceTrainer
        try:
            trainer.train(
                sentence_iterator=iter(texts),
                model_writer=model,
                vocab_size=size,
                hard_vocab_limit=False,
                model_type="bpe",
                character_coverage=1.0,
                byte_fallback=True,
                normalization_rule_name="identity",
                pad_id=PAD,
                unk_id=UNKNOWN,
                eos_id=END,
                bos_id=-1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise DataError(_why_not_learned(str(error), size)) from None
        return cls(model.getvalue())

    @classmethod
    def from_json(cls, text: str) -> "Subwords":
        """Inverts `to_json`. Raises ValueError for another text."""
        try:
            return cls(base64.b64decode(json.loads(text)["sentencepiece"], validate=True))
        except (KeyError, TypeError) as error:
            raise ValueError("it is no vocabulary") from error

    def to_json(self, **notes: str) -> str:
        """The vocabulary as JSON, with additional notes."""
        model = base64.b64encode(self.model).decode()
        return json.dumps({"sentencepiece": model, **notes}) + "\n"


def _why_not_learned(error: str, size: int) -> str:
    """The message for an error of SentencePiece, whose advice names options of its own.

    >>> _why_not_learned("Vocabulary size is smaller than required_chars. 3 vs 264.", 3)
    '`data.subwords` must be at least 264 for these characters, got data.subwords=3'
    """
    needed = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if needed:
        return (
            f"`data.subwords` must be at least {needed[1]} for these characters, got "
            f"data.subwords={size}"
        )
    reason = error.splitlines()[0].rpartition("] ")[2].partition(". ")[0]
    return f"`data.subwords`={size} cannot be learned: {reason}"


def _sentencepiece() -> Any:
    if not is_installed("sentencepiece"):
        raise DataError(f"translation needs sentencepiece, which {INSTALL}")
    import sentencepiece

    return sentencepiece


class Pairs(NamedTuple):
    """Sentences and their translations.

    Attributes:
      source, target: ids, uint16 or int32 [N, T], as `Subwords.encode` gives them.
    """

    source: np.ndarray
    target: np.ndarray


@dataclasses.dataclass(frozen=True)
class Translation:
    """Pairs of sentences in host memory.

    Attributes:
      train, test: the pairs; held-out sentences are cut to the context.
      held_out: the sentences and the translations of `test`, as they are in the files.
      left_out: the number of training pairs that are too long.
      vocabulary: the subwords, which were learned from the training pairs.
      sha256: hash of all pairs, in hexadecimal.
    """

    train: Pairs
    test: Pairs
    held_out: tuple[list[str], list[str]]
    left_out: int
    vocabulary: Subwords
    sha256: str


def load(
    source: Sequence[str], target: Sequence[str], subwords: int, context: int
) -> Translation:
    """Reads files whose lines correspond, and joins them.

    Pairs with a blank sentence are left out. The last tenth, at most 1,000 pairs, is held
    out. Training pairs with a sentence of more tokens than the context are left out.

    Args:
      source, target: files of sentences and of their translations, one sentence a line.
      subwords: the size of the vocabulary.
      context: the maximum number of tokens of a sentence, with its end.

    Raises:
      DataError: no file, or one that cannot be read, is empty, is not UTF-8, or has another
        number of lines than its translation; too few pairs; SentencePiece is not installed.
    """
    _sentencepiece()
    read = _read(source, target)
    pairs = [(a, b) for a, b in read if a.strip() and b.strip()]
    test = min(len(pairs) // 10, MOST_TEST)
    if not test:
        raise DataError(f"translation needs 10 pairs of sentences, got {len(pairs)}")
    train = pairs[:-test]
    held_out = pairs[-test:]
    vocabulary = Subwords.learned(itertools.chain(*train), subwords)
    kind = np.min_scalar_type(len(vocabulary) - 1)

    def of(texts):
        return vocabulary.encode(texts, context).astype(kind)

    # A sentence that was cut does not end with END.
    sides = Pairs(*(of(texts) for texts in zip(*train)))
    fits = np.logical_and(*((side == END).any(axis=1) for side in sides))
    if not fits.any():
        raise DataError(f"no pair of sentences fits into data.context={context} tokens")
    digest = hashlib.sha256("\n".join(map("\t".join, pairs)).encode())
    return Translation(
        Pairs(*(side[fits] for side in sides)),
        Pairs(*(of(texts) for texts in zip(*held_out))),
        ([source for source, _ in held_out], [target for _, target in held_out]),
        int((~fits).sum()),
        vocabulary,
        digest.hexdigest(),
    )


def _read(source: Sequence[str], target: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    if not source:
        raise DataError(
            "translation needs files of sentences and of their translations, one a line: "
            "`data.source` and `data.target`"
        )
    if len(source) != len(target):
        raise DataError(
            "`data.source` and `data.target` must name as many files, got "
            f"{len(source)} and {len(target)}"
        )
    for a, b in zip(source, target):
        lines = _lines(a, "data.source"), _lines(b, "data.target")
        counts = [len(each) for each in lines]
        if counts[0] != counts[1]:
            raise DataError(
                f"{a} and {b} must have the same number of lines, got {counts[0]:,} and "
                f"{counts[1]:,}"
            )
        pairs += zip(*lines)
    return pairs


def _lines(file: str, setting: str) -> list[str]:
    # splitlines() would also split at characters that stand within a sentence.
    content = text.decoded(file, text.read(file, setting)).replace("\r\n", "\n")
    return content.removesuffix("\n").split("\n")
