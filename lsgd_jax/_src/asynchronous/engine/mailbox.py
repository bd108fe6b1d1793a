"""A worker's mailbox: requests that peers can make while the worker computes."""

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from lsgd_jax._src.asynchronous.engine.contents import (
    Snapshot,
    combined,
    finite,
    nbytes,
    pack,
    unpack,
)
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.wire import Wire, WireFormat


KEPT = 16  # messages for others, at least, before the first one is forgotten
CONTRIBUTED = 4  # means whose contribution it remembers
GONE = "gone"  # the answer to a fetch of a message that is forgotten


class Mailbox:
    """The mailbox of one worker. Calls take a lock while parameters are copied or added.

    The worker publishes its parameters by `show`. At the boundaries of its steps it adds
    the sum of the moves that peers have left for it, see `moved`. All answers to peers are
    packed.

    Args:
      wire: the format in which parameters travel, or a `Wire`.
      index: of the worker.

    Attributes:
      wire: the format.
      bytes_sent: to others, so far.
      state: returns the state from which another worker can go on in this one's place, or
        None. The worker sets it.
    """

    def __init__(self, wire: Wire | WireFormat = "float32", index: int = 0):
        self.wire = Wire.of(wire)
        self._index = index
        self._lock = threading.Condition(threading.RLock())
        self._posted: OrderedDict[Hashable, Any] = OrderedDict()
        self._kept = KEPT
        self._readers: dict[Hashable, int] = {}  # fetches left
        self._forgotten: OrderedDict[Hashable, None] = OrderedDict()
        self._contributed: OrderedDict[int, tuple[Snapshot, Snapshot, Tree]]
        self._contributed = OrderedDict()
        self._params: Callable[[], Tree] | None = None
        self._shown: Tree = None  # `_params()`, once a peer has asked for it
        self._measure: float  # known, as the parameters are, from the first `show` on
        self._reference: Tree = None
        self._moved: Tree = None
        self._closed = False
        self._packed = 0  # number of trees so far
        self.bytes_sent = 0
        self.state: Callable[[], Any] = lambda: None

    # The worker's own side

    def show(
        self, params: Callable[[], Tree], measure: float = 0.0, reference: Tree = None
    ) -> None:
        """Publishes the worker.

        Args:
          params: makes the tree of its parameters, when a peer asks for it.
          measure: see `Snapshot`.
          reference: is subtracted from contributions to means. Defaults to 0.
        """
        with self._lock:
            self._params = params
            self._shown = None
            self._measure = measure
            self._reference = reference
            self._tell(None)

    def packed(self, tree: Tree) -> Any:
        """Returns a tree as it travels. Stochastic rounding draws anew each time."""
        self._packed += 1
        return pack(tree, self.wire, self._packed, self._index)

    def encoded(self, tree: Tree, error: Tree = None) -> tuple[Any, Tree, Tree]:
        """Returns a tree as it travels, the tree that arrives, and the quantization error.

        error: of earlier trees, which is added to this one. The errors are None where
          nothing is rounded.
        """
        if not self.wire.is_narrow or not finite(tree):
            return tree, tree, None
        owed = tree if error is None else combined(operator.add, tree, error)
        packed = self.packed(owed)
        arrives = unpack(packed)
        return packed, arrives, combined(operator.sub, owed, arrives)

    def keep(self, messages: int) -> None:
        """Keeps at least so many messages before it forgets the first."""
        self._kept = max(self._kept, messages)

    def post(self, key: Hashable, content: Any, readers: int | None = None) -> None:
        """Leaves a content for peers to fetch; forgets the oldest one if there are many.

        Args:
          key: under which peers fetch it.
          content: as it travels, or a function of it, called at the first fetch.
          readers: the number of fetches after which it is forgotten. Defaults to no limit.
        """
        with self._lock:
            self._posted[key] = content
            if readers is not None:
                self._readers[key] = readers
            while len(self._posted) > self._kept:
                self.drop(next(iter(self._posted)))
            self._tell(key)

    def drop(self, key: Hashable) -> None:
        """Forgets the content posted under a key: a later fetch gets `GONE`."""
        with self._lock:
            self._posted.pop(key, None)
            self._readers.pop(key, None)
            self._forgotten[key] = None
            while len(self._forgotten) > 100 * self._kept:
                self._forgotten.popitem(last=False)

    def moved(self, last: bool = False) -> Tree:
        """Returns the sum of all moves by `exchange` since the last call, or None.

        The worker must add it to the parameters that it shows next.

        last: whether later exchanges move neither worker.
        """
        with self._lock:
            self._closed = self._closed or last
            moved = self._moved
            if moved is not None:
                self._shown = self._current()  # peers see it moved until the next `show`
            self._moved = None
            return moved

    def contributed(self, number: int) -> tuple[Snapshot, Snapshot, Tree]:
        """Returns the worker's own contribution to a mean, the snapshot when first asked.

        Its tree is the difference to the reference, see `show`.

        Returns:
          The contribution as it travels, as it arrives at others, and its quantization
          error, which is None if nothing is rounded.
        """
        with self._lock:
            if number not in self._contributed:
                exact = self._current()
                if self._reference is not None:
                    exact = combined(operator.sub, exact, self._reference)
                packed, arrives, error = self.encoded(exact)
                self._contributed[number] = (
                    Snapshot(packed, self._measure),
                    Snapshot(arrives, self._measure),
                    error,
                )
                while len(self._contributed) > CONTRIBUTED:
                    self._contributed.popitem(last=False)
            return self._contributed[number]

    # Requests of peers. The answer is None until there is something to answer.

    def latest(self) -> Snapshot | None:
        """Returns the parameters, with the moves by other workers."""
        with self._lock:
            return self.count(self._snapshot())

    def exchange(self, theirs: Any) -> Any:
        """Moves this worker half the way to a peer; returns the tree the peer moves to.

        Both move, so that their sum does not change. If either tree is not finite, this
        worker stays where it is, and the peer must do the same.
        """
        given = unpack(theirs)
        with self._lock:
            snapshot = self._snapshot()
            if snapshot is None:
                return None
            sent = theirs if self._closed else snapshot.params
            half = half_way(unpack(sent), given)
            if finite(half) and not self._closed:
                moved = self._moved
                self._moved = half if moved is None else combined(operator.add, moved, half)
            return self.count(sent)

    def fetch(self, key: Hashable, part: slice = slice(None)) -> Any:
        """Returns the content posted under a key, or a part of a vector; `GONE` if gone."""
        with self._lock:
            content = self._posted.get(key)
            if content is None:
                return GONE if key in self._forgotten else None
            if callable(content):
                content = self._posted[key] = content()
            if key in self._readers:
                self._readers[key] -= 1
                if not self._readers[key]:
                    self.drop(key)
            return self.count(content if part == slice(None) else content[part])

    def contribution(self, number: int) -> Snapshot | None:
        """Returns the contribution to mean `number`, see `contributed`."""
        with self._lock:
            if self._params is None:
                return None
            return self.count(self.contributed(number)[0])

    def wait(self, ask: Callable[[], Any], timeout: float) -> Any:
        """Waits until `ask` returns a value other than None; returns None on timeout.

        For engines that serve requests in threads.
        """

        def answered() -> list[Any]:
            """The answer in a list, because it may itself be false; [] without one."""
            answer = ask()
            return [] if answer is None else [answer]

        with self._lock:
            found = self._lock.wait_for(answered, timeout)
        return found[0] if found else None

    def count(self, content: Any) -> Any:
        """Counts the bytes of a content as sent; returns it."""
        with self._lock:  # peers are served in threads
            self.bytes_sent += nbytes(content)
        return content

    def _tell(self, key: Hashable | None) -> None:
        """Wakes requests that wait for a post under a key, or for `show` (None)."""
        self._lock.notify_all()

    def _snapshot(self) -> Snapshot | None:
        """Returns the published worker, packed."""
        if self._params is None:
            return None
        return Snapshot(self.packed(self._current()), self._measure)

    def _current(self) -> Tree:
        assert self._params is not None
        if self._shown is None:
            self._shown = self._params()
        if self._moved is None:
            return self._shown
        return combined(operator.add, self._shown, self._moved)


def half_way(tree: Tree, other: Tree) -> Tree:
    """Returns the move by half the way from a tree to another one."""
    return combined(lambda x, y: (y - x) / 2, tree, other)
