"""Bytes that a worker sends at each step, computed from the schedules of its pulls."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import lsgd_jax as lj


def schedules(diagnostics: Iterable[lj.Diagnostics]) -> list[tuple[int, ...]]:
    """The messages of each pull up to the latest step: (every, first, payload, count).

    Each worker sends `payload` bytes every so many steps, `count` times from step `first`
    on; 0 stands for the end of the first period. A pull whose period changes has several.
    """
    found = []
    for pull in diagnostics:
        runs = [(pull.period, pull.sends_at, pull.exchanges)]
        if pull.schedule is not None:
            runs = pull.schedule.messages(pull.exchanges)
        found += [(every, first, pull.payload, count) for every, first, count in runs]
    return found


def per_step(pulls: Iterable[Sequence[int]], steps: int) -> np.ndarray:
    """Bytes that each worker has sent at step 1, 2, …, summed over the pulls.

    Args:
      pulls: see `schedules`.
      steps: the number of steps.

    >>> per_step([(3, 0, 80, 2), (2, 1, 5, 3)], steps=7).tolist()
    [5, 0, 85, 0, 5, 80, 0]
    """
    sent = np.zeros(steps + 1, np.int64)
    for every, first, payload, count in pulls:
        sent[first or every :: every][:count] += payload
    return sent[1:]


def of_run(train: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    """`per_step` of a run, from its events `train`; None if they have no schedules.

    If a run was resumed with another number of workers, the latest schedules count.
    """
    known = [event for event in train if event.get("pulls")]
    return per_step(known[-1]["pulls"], known[-1]["step"]) if known else None
