"""Steps that have been handed to the devices and are not done."""

import collections
from typing import Any

import jax


class Backlog:
    """Waits for the oldest step when more than `most` are on their way.

    A step holds its batch until it is done. Without a bound a reader that is faster than
    the devices would fill their memory, and a run that is asked to stop would first do all
    the steps that it has handed over.
    """

    def __init__(self, most: int):
        self._most = most
        self._results: collections.deque[Any] = collections.deque()

    def add(self, result: Any) -> Any:
        """Notes what a step that has just been handed over will result in; that result."""
        self._results.append(result)
        if len(self._results) > self._most:
            jax.block_until_ready(self._results.popleft())
        return result
