"""Choice of the peer to ask, which avoids peers that do not answer."""

from collections.abc import Sequence

import numpy as np


MOST = 6  # a peer that never answers is left out of 2^6 choices at a time


class Peers:
    """The workers that one may ask.

    A peer that has not answered is left out of the next 1, 2, 4, … choices, until it
    answers again.

    Args:
      candidates: indices of the peers.
      seed: seed of the choices.

    >>> peers = Peers([0, 2], seed=(0, 1))
    >>> peers.failed(2)
    >>> peers.choose(), peers.is_tried(2)
    (0, True)
    """

    def __init__(self, candidates: Sequence[int], seed: Sequence[int] = ()):
        self._left_out = dict.fromkeys(candidates, 0)  # number of choices from now on
        self._failures = dict.fromkeys(candidates, 0)
        self._random = np.random.default_rng(list(seed))

    def choose(self) -> int | None:
        """Returns a random peer that is not left out, or None without one."""
        tried = [i for i, left in self._left_out.items() if not left]
        self.turn()
        return int(self._random.choice(tried)) if tried else None

    def draw(self, probability: float) -> bool:
        """Returns True with a probability."""
        return bool(self._random.random() < probability)

    def is_tried(self, i: int) -> bool:
        """Returns whether a worker is not left out."""
        return not self._left_out.get(i, 0)

    def turn(self) -> None:
        """Counts one more choice."""
        self._left_out = {i: max(0, left - 1) for i, left in self._left_out.items()}

    def failed(self, i: int) -> None:
        """Notes that a peer has not answered."""
        self._left_out[i] = 2 ** self._failures[i]
        self._failures[i] = min(self._failures[i] + 1, MOST)

    def answered(self, i: int) -> None:
        """Notes that a peer has answered."""
        self._left_out[i] = self._failures[i] = 0
