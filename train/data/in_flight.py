"""A bound on the steps that are in flight on the devices."""

import collections
from typing import Any

import jax


class Backlog:
    """Waits for the oldest step when more than `most` steps are in flight.

    A step keeps its batch in memory until it is done. Without a bound, a reader that is
    faster than the devices would fill their memory, and a run that is asked to stop would
    first finish all dispatched steps.
    """

    def __init__(self, most: int):
        self._most = most
        self._results: collections.deque[Any] = collections.deque()

    def add(self, result: Any) -> Any:
        """Adds the result of a step that was just dispatched, and returns it."""
        self._results.append(result)
        if len(self._results) > self._most:
            jax.block_until_ready(self._results.popleft())
        return result
