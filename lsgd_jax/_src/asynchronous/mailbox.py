"""What others may ask of a worker while it computes its next step."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.compression import Compression
from lsgd_jax._src.asynchronous.snapshot import Snapshot


KEPT = 16  # messages that a worker leaves for others before it forgets the first
CONTRIBUTED = 4  # means that it remembers its part of
GONE = "gone"  # what a fetch gives of a message that is forgotten


def finite(vector: np.ndarray) -> bool:
    """Whether all of a float32 vector is; in one pass, without a copy."""
    return bool(np.isfinite(np.sum(vector, dtype=np.float64)))


class Mailbox:
    """Of one worker. Its calls take a lock for as long as a vector is copied or added.

    The worker sets what others see by `show`, and moves by what others have left in
    `moved` at the boundary of its steps.

    Args:
      wire: how vectors travel; None: in float32.

    Attributes:
      wire: as above.
      bytes_sent: to others, so far.
    """

    def __init__(self, wire: Compression | None = None):
        self.wire = Compression() if wire is None else wire
        self._lock = threading.Condition(threading.RLock())
        self._posted: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._forgotten: OrderedDict[Hashable, None] = OrderedDict()
        self._contributed: OrderedDict[int, Snapshot] = OrderedDict()
        self._vector: Callable[[], np.ndarray] | None = None
        self._flat: np.ndarray | None = None
        self._about = (0, 0.0, float("inf"))
        self._moved: np.ndarray | None = None
        self._closed = False
        self._state: Callable[[], Any] | None = None
        self._turn = 0  # of what was rounded
        self.bytes_sent = 0

    # The worker's own side

    def show(
        self,
        vector: Callable[[], np.ndarray],
        step: int,
        measure: float = 0.0,
        loss: float = float("inf"),
    ) -> None:
        """Lets others see where this worker is; the vector is made when one asks for it."""
        with self._lock:
            self._vector, self._flat, self._about = vector, None, (step, measure, loss)
            self._lock.notify_all()

    def rounded(self, vector: np.ndarray) -> np.ndarray:
        """What others get of a vector; drawn anew each time if it is rounded at random."""
        self._turn += 1
        return self.wire.rounded(vector, self._turn)

    def serve_state(self, state: Callable[[], Any]) -> None:
        """Sets what `state` gives."""
        self._state = state

    def post(self, key: Hashable, vector: np.ndarray) -> None:
        """Leaves a vector for whoever fetches it; the oldest of many is forgotten."""
        with self._lock:
            self._posted[key] = vector
            while len(self._posted) > KEPT:
                self.drop(next(iter(self._posted)))
            self._lock.notify_all()

    def drop(self, key: Hashable) -> None:
        """Forgets what is posted under a key: who fetches it later gets `GONE`."""
        with self._lock:
            self._posted.pop(key, None)
            self._forgotten[key] = None
            while len(self._forgotten) > 100 * KEPT:
                self._forgotten.popitem(last=False)

    def moved(self) -> np.ndarray | None:
        """What `exchange` has added since this was asked last; None: nothing.

        The parameters that are shown next must have it in them.
        """
        with self._lock:
            moved = self._moved
            if moved is not None and (snapshot := self._snapshot()) is not None:
                self._flat = snapshot.vector  # until then, what is shown has it as well
            self._moved = None
            return moved

    def close(self) -> np.ndarray | None:
        """As `moved`, for the last time: from now on `exchange` moves neither worker."""
        with self._lock:
            self._closed = True
            return self.moved()

    def contributed(self, number: int) -> Snapshot | None:
        """What `contribution` gives, to this worker itself."""
        with self._lock:
            if number not in self._contributed:
                if (snapshot := self._snapshot()) is None:
                    return None
                self._contributed[number] = snapshot
                while len(self._contributed) > CONTRIBUTED:
                    self._contributed.popitem(last=False)
            return self._contributed.get(number)

    # What others ask for

    @property
    def is_shown(self) -> bool:
        """Whether the worker has begun."""
        return self._vector is not None

    def latest(self) -> Snapshot | None:
        """The parameters, with what others have added; None before the worker begins."""
        with self._lock:
            return self._sent(self._snapshot())

    def exchange(self, theirs: np.ndarray) -> np.ndarray | None:
        """Moves this worker half the way to a peer; gives what the peer moves half way to.

        Both at once, so that the sum of the two stays what it was. If one of them is not
        finite this one stays; the other must, too.
        """
        with self._lock:
            if (snapshot := self._snapshot()) is None:
                return None
            mine = theirs if self._closed else snapshot.vector
            self._count(mine)
            with np.errstate(invalid="ignore", over="ignore"):
                half = (theirs - mine) / 2
            if finite(half) and not self._closed:
                self._moved = half if self._moved is None else self._moved + half
            return mine

    def read(self, key: Hashable, part: slice = slice(None)) -> np.ndarray | str | None:
        """What is posted under a key, None if nothing is yet, or `GONE`."""
        with self._lock:
            if (vector := self._posted.get(key)) is None:
                return GONE if key in self._forgotten else None
            self._count(vector[part])
            return vector[part]

    def contribution(self, number: int) -> Snapshot | None:
        """What is shown, and stays this worker's part of the mean with this number."""
        with self._lock:
            return self._sent(self.contributed(number))

    def state(self) -> Any:
        """All that another worker needs to go on in this one's place."""
        return None if self._state is None else self._state()

    def wait(self, ask: Callable[[], Any], timeout: float) -> Any:
        """What a call gives as soon as it is not None; None if it is not in time.

        For engines where calls come in threads of their own.
        """
        answer = None

        def answered() -> bool:
            nonlocal answer
            answer = ask()
            return answer is not None

        with self._lock:
            self._lock.wait_for(answered, timeout)
        return answer

    def _sent(self, snapshot: Snapshot | None) -> Snapshot | None:
        if snapshot is not None:
            self._count(snapshot.vector)
        return snapshot

    def _count(self, vector: np.ndarray) -> None:
        self.bytes_sent += self.wire.nbytes(vector.size)

    def _snapshot(self) -> Snapshot | None:
        if self._vector is None:
            return None
        if self._flat is None:
            self._flat = np.asarray(self._vector())
        vector = self._flat if self._moved is None else self._flat + self._moved
        return Snapshot(self.rounded(vector), *self._about)
