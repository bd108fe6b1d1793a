"""Bytes that a worker sends at each step, computed from the schedules of its pulls."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import lsgd_jax as lj


class Schedule(NamedTuple):
    """The schedule of a pull; a list in metrics.jsonl.

    Attributes:
      every, sends_at: the pull sends at t ≡ sends_at (mod every).
      payload: bytes that each worker sends at such a step.
      exchanges: number of such steps at which it has sent, counted from the first.
    """

    every: int
    sends_at: int
    payload: int
    exchanges: int


def schedules(diagnostics: Iterable[lj.Diagnostics]) -> list[Schedule]:
    """The schedule of each pull, from the diagnostics after the latest step."""
    return [
        Schedule(pull.period, pull.sends_at, pull.payload, pull.exchanges)
        for pull in diagnostics
    ]


def per_step(pulls: Iterable[Sequence[int]], steps: int) -> np.ndarray:
    """Bytes that each worker has sent at step 1, 2, …, summed over the pulls.

    >>> per_step([(3, 0, 80, 2), (2, 1, 5, 3)], steps=7).tolist()
    [5, 0, 85, 0, 5, 80, 0]
    """
    sent = np.zeros(steps + 1, np.int64)
    for every, sends_at, payload, exchanges in pulls:
        first = sends_at or every
        sent[first::every][:exchanges] += payload
    return sent[1:]


def of_run(train: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    """`per_step` of a run, from its events `train`; None if they have no schedules.

    If a run was resumed with another number of workers, the latest schedules count.
    """
    known = [event for event in train if event.get("pulls")]
    return per_step(known[-1]["pulls"], known[-1]["step"]) if known else None
