"""Training examples that no worker trains on, whose loss elects leaders."""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import numpy as np

import lsgd_jax as lj
from train.data.arrays import DataError, Dataset
from train.data.imagenet import Files, ImageFolder
from train.data.text import Text
from train.data.translation import Translation


SEED = 0  # the same examples in each run, whatever its own seed

InRows = TypeVar("InRows", Dataset, Translation)


class WithHeldOut(NamedTuple):
    """The data of a step, with examples that are held out.

    Attributes:
      train: the training data of a source.
      held_out: a batch in the form of a test batch, equal for all workers.
    """

    train: Any
    held_out: lj.Shared


def examples(data: InRows, count: int) -> tuple[InRows, Any]:
    """Holds random examples out: (the data without them, a test batch of them).

    Raises:
      DataError: no example would be left for training.

    >>> from train.data.digits import load
    >>> rest, (images, labels, counts) = examples(load(), 100)
    >>> len(rest.train.labels), images.shape, int(counts.sum())
    (1337, (100, 8, 8, 1), 100)
    """
    left, taken = _rows(len(data.train[0]), count)
    batch = *(x[taken] for x in data.train), np.ones(count, bool)
    train: Any = type(data.train)(*(x[left] for x in data.train))
    if isinstance(data, Dataset):
        return data._replace(train=train), batch
    return dataclasses.replace(data, train=train), batch


def files(folder: ImageFolder, count: int) -> tuple[ImageFolder, Files]:
    """Holds random image files out: (the folder without them, these files).

    Raises:
      DataError: no image would be left for training.
    """
    train = folder.train
    left, taken = _rows(len(train.labels), count)

    def some(rows: np.ndarray) -> Files:
        return dataclasses.replace(
            train, names=train.names[rows], labels=train.labels[rows]
        )

    return dataclasses.replace(folder, train=some(left)), some(taken)


def windows(text: Text, context: int, count: int) -> tuple[Text, Any]:
    """Holds the last windows of the training text out: (the rest, a test batch of them).

    Args:
      text: the token ids.
      context: T, the number of tokens that a window predicts.
      count: the number of windows.

    Raises:
      DataError: no window would be left for training.

    >>> from train.data.text import of
    >>> text = of(b"to be or not to be, that is the question", "characters")
    >>> rest, (ids, counts) = windows(text, context=5, count=2)
    >>> len(text.train), len(rest.train), text.vocabulary.decode(ids[1])
    (36, 25, 'e ques')
    """
    length = context + 1
    _check(count, len(text.train) // length, "windows")
    begin = len(text.train) - count * context - 1
    places = begin + np.arange(count)[:, None] * context + np.arange(length)
    batch = text.train[places], np.ones((count, context), bool)
    return dataclasses.replace(text, train=text.train[:begin]), batch


def _rows(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows that are left for training, and those that are held out, both ascending."""
    _check(count, size, "examples")
    order = np.random.default_rng(SEED).permutation(size)
    return np.sort(order[count:]), np.sort(order[:count])


def _check(count: int, size: int, name: str) -> None:
    if count >= size:
        raise DataError(
            f"`method.held_out` must be below {size:,}, the number of training {name}, got "
            f"method.held_out={count}"
        )
