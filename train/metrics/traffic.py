"""What a worker sends at each step, out of the schedules of its pulls."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import lsgd_jax as lj


class Schedule(NamedTuple):
    """When a pull sends how much; in metrics.jsonl as a list.

    Attributes:
      every, sends_at: it sends at t = sends_at (mod every).
      payload: bytes that each worker sends at one of these steps.
      exchanges: how many of these steps, from the first on, it has sent at.
    """

    every: int
    sends_at: int
    payload: int
    exchanges: int


def schedules(diagnostics: Iterable[lj.Diagnostics]) -> list[Schedule]:
    """The schedule of every pull, once a step has been taken."""
    return [
        Schedule(pull.period, pull.sends_at, pull.payload, pull.exchanges)
        for pull in diagnostics
    ]


def per_step(pulls: Iterable[Sequence[int]], steps: int) -> np.ndarray:
    """Bytes that each worker has sent at step 1, 2, …, all pulls together.

    >>> per_step([(3, 0, 80, 2), (2, 1, 5, 3)], steps=7).tolist()
    [5, 0, 85, 0, 5, 80, 0]
    """
    sent = np.zeros(steps + 1, np.int64)
    for every, sends_at, payload, exchanges in pulls:
        first = sends_at or every
        sent[first::every][:exchanges] += payload
    return sent[1:]


def of_run(train: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    """`per_step` of a run, from its events `train`; None if they do not say.

    Of a run that has gone on with other workers it is as these ones send.
    """
    known = [event for event in train if event.get("pulls")]
    return per_step(known[-1]["pulls"], known[-1]["step"]) if known else None
