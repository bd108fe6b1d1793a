"""A worker's mailbox: requests that peers can make while the worker computes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.engine.vectors import Snapshot, finite, nbytes, pack, unpack
from lsgd_jax._src.wire.wire import Wire, WireFormat


KEPT = 16  # messages that a worker leaves for others before it forgets the first
CONTRIBUTED = 4  # means whose contribution it remembers
GONE = "gone"  # the answer to a fetch of a message that is forgotten


class Mailbox:
    """The mailbox of one worker. Calls take a lock while a vector is copied or added.

    The worker publishes its parameters by `show`. At the boundaries of its steps it adds
    the sum of the moves that peers have left for it, see `moved`. All answers to peers are
    packed.

    Args:
      wire: the format in which vectors travel, or a `Wire`.
      index: of the worker.

    Attributes:
      wire: the format.
      bytes_sent: to others, so far.
      state: returns the state from which another worker can go on in this one's place, or
        None. The worker sets it.
    """

    def __init__(self, wire: Wire | WireFormat = "float32", index: int = 0):
        self.wire, self._index = Wire.of(wire), index
        self._lock = threading.Condition(threading.RLock())
        self._posted: OrderedDict[Hashable, Any] = OrderedDict()
        self._readers: dict[Hashable, int] = {}  # fetches left
        self._forgotten: OrderedDict[Hashable, None] = OrderedDict()
        # Each as it travels, and its exact vector.
        self._contributed: OrderedDict[int, tuple[Snapshot, np.ndarray]] = OrderedDict()
        self._vector: Callable[[], np.ndarray] | None = None
        self._flat: np.ndarray | None = None
        self._measure = 0.0
        self._reference: np.ndarray | None = None
        self._moved: np.ndarray | None = None
        self._closed = False
        self._turn = 0  # number of vectors packed
        self.bytes_sent = 0
        self.state: Callable[[], Any] = lambda: None

    @property
    def is_narrow(self) -> bool:
        """Whether vectors are rounded for the wire."""
        return self.wire.format != "float32"

    # The worker's own side

    def show(
        self,
        vector: Callable[[], np.ndarray],
        measure: float = 0.0,
        reference: np.ndarray | None = None,
    ) -> None:
        """Publishes the worker; the vector is made when a peer asks for it.

        reference: is subtracted from contributions to means. Defaults to 0.
        """
        with self._lock:
            self._vector, self._flat, self._measure = vector, None, measure
            self._reference = reference
            self._tell(None)

    def packed(self, vector: np.ndarray) -> Any:
        """Returns a vector as it travels. Stochastic rounding draws anew each time."""
        self._turn += 1
        return pack(vector, self.wire, self._turn, self._index)

    def encoded(self, vector: np.ndarray) -> tuple[Any, np.ndarray]:
        """Returns a vector as it travels, and the vector that arrives."""
        packed = self.packed(vector)
        return packed, unpack(packed)

    def post(self, key: Hashable, vector: Any, readers: int | None = None) -> None:
        """Leaves a vector for peers to fetch; forgets the oldest one if there are many.

        Args:
          key: under which peers fetch it.
          vector: any content that travels, or a function of it, called at the first fetch.
          readers: the number of fetches after which it is forgotten. Defaults to no limit.
        """
        packed = self.packed(vector) if isinstance(vector, np.ndarray) else vector
        with self._lock:
            self._posted[key] = packed
            if readers is not None:
                self._readers[key] = readers
            while len(self._posted) > KEPT:
                self.drop(next(iter(self._posted)))
            self._tell(key)

    def drop(self, key: Hashable) -> None:
        """Forgets the vector posted under a key: a later fetch gets `GONE`."""
        with self._lock:
            self._posted.pop(key, None)
            self._readers.pop(key, None)
            self._forgotten[key] = None
            while len(self._forgotten) > 100 * KEPT:
                self._forgotten.popitem(last=False)

    def moved(self) -> np.ndarray | None:
        """Returns the sum of all moves by `exchange` since the last call, or None.

        The worker must add it to the parameters that it shows next.
        """
        with self._lock:
            moved = self._moved
            if moved is not None:
                self._flat = self._current()  # peers see it moved until the next `show`
            self._moved = None
            return moved

    def close(self) -> np.ndarray | None:
        """Returns `moved` for the last time: later exchanges move neither worker."""
        with self._lock:
            self._closed = True
            return self.moved()

    def contributed(self, number: int) -> tuple[Snapshot, Any]:
        """Returns the worker's own `contribution` to a mean, and its quantization error.

        The contribution is as it arrives at others. The error is 0 if it is not finite.
        """
        traveling, exact = self._contribution(number)
        arrived = unpack(traveling)
        if not self.is_narrow or not finite(exact):
            return arrived, np.float32(0)
        return arrived, exact - arrived.vector

    # Requests of peers. The answer is None until there is something to answer.

    def latest(self) -> Snapshot | None:
        """Returns the parameters, with the moves by other workers."""
        with self._lock:
            return self.count(self._snapshot())

    def exchange(self, theirs: Any) -> Any:
        """Moves this worker half the way to a peer; returns the vector the peer moves to.

        Both move, so that their sum does not change. If either vector is not finite, this
        worker stays where it is, and the peer must do the same.
        """
        given = unpack(theirs)
        with self._lock:
            if (snapshot := self._snapshot()) is None:
                return None
            sent = theirs if self._closed else snapshot.vector
            with np.errstate(invalid="ignore", over="ignore"):
                half = (given - unpack(sent)) / 2
            if finite(half) and not self._closed:
                self._moved = half if self._moved is None else self._moved + half
            return self.count(sent)

    def fetch(self, key: Hashable, part: slice = slice(None)) -> Any:
        """Returns the vector posted under a key, or a part of it; `GONE` if forgotten."""
        with self._lock:
            if (vector := self._posted.get(key)) is None:
                return GONE if key in self._forgotten else None
            if callable(vector):
                vector = self._posted[key] = vector()
            if key in self._readers:
                self._readers[key] -= 1
                if not self._readers[key]:
                    self.drop(key)
            whole = part == slice(None) or not isinstance(vector, np.ndarray)
            return self.count(vector if whole else vector[part])

    def contribution(self, number: int) -> Snapshot | None:
        """Returns the contribution to mean `number`: the snapshot when first asked.

        Its vector is the difference to the reference, see `show`.
        """
        with self._lock:
            if self._vector is None:
                return None
            return self.count(self._contribution(number)[0])

    def wait(self, ask: Callable[[], Any], timeout: float) -> Any:
        """Waits until `ask` returns a value other than None; returns None on timeout.

        For engines that serve requests in threads.
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
        """Counts the bytes of a content as sent; returns it."""
        self.bytes_sent += nbytes(content)
        return content

    def _tell(self, key: Hashable | None) -> None:
        """Wakes requests that wait for a post under a key, or for `show` (None)."""
        self._lock.notify_all()

    def _contribution(self, number: int) -> tuple[Snapshot, np.ndarray]:
        with self._lock:
            if number not in self._contributed:
                exact = self._current()
                if self._reference is not None:
                    exact = exact - self._reference
                traveling = Snapshot(self.packed(exact), self._measure)
                self._contributed[number] = traveling, exact
                while len(self._contributed) > CONTRIBUTED:
                    self._contributed.popitem(last=False)
            return self._contributed[number]

    def _snapshot(self) -> Snapshot | None:
        """Returns the published worker, packed."""
        if self._vector is None:
            return None
        return Snapshot(self.packed(self._current()), self._measure)

    def _current(self) -> np.ndarray:
        assert self._vector is not None
        if self._flat is None:
            self._flat = np.asarray(self._vector())
        return self._flat if self._moved is None else self._flat + self._moved
