"""A worker's mailbox: requests that peers can make while the worker computes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.compression import Compression, Snapshot, finite


KEPT = 16  # messages that a worker leaves for others before it forgets the first
CONTRIBUTED = 4  # means whose contribution it remembers
GONE = "gone"  # the answer to a fetch of a message that is forgotten


class Mailbox:
    """The mailbox of one worker. Calls take a lock while a vector is copied or added.

    The worker sets what others see by `show`, and moves by what others have left in
    `moved` at the boundary of its steps. What is returned to others is packed.

    Args:
      wire: how vectors travel. Defaults to float32.

    Attributes:
      wire: as above.
      bytes_sent: to others, so far.
    """

    def __init__(self, wire: Compression | None = None):
        self.wire = Compression() if wire is None else wire
        self._lock = threading.Condition(threading.RLock())
        self._posted: OrderedDict[Hashable, Any] = OrderedDict()
        self._forgotten: OrderedDict[Hashable, None] = OrderedDict()
        self._contributed: OrderedDict[int, Snapshot] = OrderedDict()
        self._vector: Callable[[], np.ndarray] | None = None
        self._flat: np.ndarray | None = None
        self._about = (0, 0.0, float("inf"))
        self._moved: np.ndarray | None = None
        self._closed = False
        self._state: Callable[[], Any] | None = None
        self._turn = 0  # of what was packed
        self.bytes_sent = 0

    # The worker's own side

    def show(
        self,
        vector: Callable[[], np.ndarray],
        step: int,
        measure: float = 0.0,
        loss: float = float("inf"),
    ) -> None:
        """Publishes the worker; the vector is made when a peer asks for it."""
        with self._lock:
            self._vector, self._flat, self._about = vector, None, (step, measure, loss)
            self._lock.notify_all()

    def packed(self, vector: np.ndarray) -> Any:
        """A vector as others get it; drawn anew each time if it is rounded at random."""
        self._turn += 1
        return self.wire.pack(vector, self._turn)

    def encoded(self, vector: np.ndarray) -> tuple[Any, np.ndarray]:
        """A vector as others get it, and the vector that arrives."""
        packed = self.packed(vector)
        return packed, self.wire.unpack(packed)

    def serve_state(self, state: Callable[[], Any]) -> None:
        """Sets what `state` returns."""
        self._state = state

    def post(self, key: Hashable, vector: Any) -> None:
        """Leaves a vector for peers to fetch; the oldest of many is forgotten."""
        packed = self.packed(vector) if isinstance(vector, np.ndarray) else vector
        with self._lock:
            self._posted[key] = packed
            while len(self._posted) > KEPT:
                self.drop(next(iter(self._posted)))
            self._lock.notify_all()

    def drop(self, key: Hashable) -> None:
        """Forgets what is posted under a key: a later fetch gets `GONE`."""
        with self._lock:
            self._posted.pop(key, None)
            self._forgotten[key] = None
            while len(self._forgotten) > 100 * KEPT:
                self._forgotten.popitem(last=False)

    def moved(self) -> np.ndarray | None:
        """The sum of what `exchange` has added since this was asked last, or None.

        The parameters that are shown next must have it in them.
        """
        with self._lock:
            moved = self._moved
            if moved is not None:
                self._flat = self._current()  # until then, what is shown has it as well
            self._moved = None
            return moved

    def close(self) -> np.ndarray | None:
        """As `moved`, for the last time: from now on `exchange` moves neither worker."""
        with self._lock:
            self._closed = True
            return self.moved()

    def contributed(self, number: int) -> Snapshot | None:
        """The worker's own contribution to a mean, as others get it."""
        snapshot = self._contribution(number)
        return None if snapshot is None else self.wire.unpack(snapshot)

    # Requests of others. The answer is None as long as there is nothing to answer.

    def latest(self) -> Snapshot | None:
        """The parameters, with what others have added."""
        with self._lock:
            return self.count(self._snapshot())

    def exchange(self, theirs: Any) -> Any:
        """Moves this worker half the way to a peer; returns what the peer moves to.

        Both move at once, so that the sum of the two stays as it was. If one of them is not
        finite this one stays; the other must, too.
        """
        given = self.wire.unpack(theirs)
        with self._lock:
            if (snapshot := self._snapshot()) is None:
                return None
            sent = theirs if self._closed else snapshot.vector
            with np.errstate(invalid="ignore", over="ignore"):
                half = (given - self.wire.unpack(sent)) / 2
            if finite(half) and not self._closed:
                self._moved = half if self._moved is None else self._moved + half
            return self.count(sent)

    def fetch(self, key: Hashable, part: slice = slice(None)) -> Any:
        """The vector that is posted under a key, or `GONE`."""
        with self._lock:
            if (vector := self._posted.get(key)) is None:
                return GONE if key in self._forgotten else None
            whole = part == slice(None) or not isinstance(vector, np.ndarray)
            return self.count(vector if whole else vector[part])

    def contribution(self, number: int) -> Snapshot | None:
        """The snapshot that stays this worker's contribution to the mean `number`."""
        with self._lock:
            return self.count(self._contribution(number))

    def state(self) -> Any:
        """The state from which another worker can go on in this one's place."""
        return None if self._state is None else self._state()

    def wait(self, ask: Callable[[], Any], timeout: float) -> Any:
        """Waits until `ask` returns a value other than None; returns None on timeout.

        For engines where requests come in threads of their own.
        """
        answer = None

        def answered() -> bool:
            nonlocal answer
            answer = ask()
            return answer is not None

        with self._lock:
            self._lock.wait_for(answered, timeout)
        return answer

    def count(self, content: Any) -> Any:
        """The content, whose bytes are counted as sent."""
        self.bytes_sent += self.wire.nbytes(content)
        return content

    def _contribution(self, number: int) -> Snapshot | None:
        with self._lock:
            if number not in self._contributed:
                if (snapshot := self._snapshot()) is None:
                    return None
                self._contributed[number] = snapshot
                while len(self._contributed) > CONTRIBUTED:
                    self._contributed.popitem(last=False)
            return self._contributed.get(number)

    def _snapshot(self) -> Snapshot | None:
        """The worker as it is shown, packed."""
        if self._vector is None:
            return None
        return Snapshot(self.packed(self._current()), *self._about)

    def _current(self) -> np.ndarray:
        assert self._vector is not None
        if self._flat is None:
            self._flat = np.asarray(self._vector())
        return self._flat if self._moved is None else self._flat + self._moved
