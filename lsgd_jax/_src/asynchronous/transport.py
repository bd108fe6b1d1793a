"""The calls that one worker can make to its peers and to the coordinator.

An engine (Ray, the simulator) implements `Transport` for each worker. The methods are
coroutines on one asyncio loop per worker on Ray, and on one loop of virtual time in the
simulator. A call starts at once and returns an `asyncio.Task`.
"""

import abc
import asyncio
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lsgd_jax._src.asynchronous.mailbox import Mailbox


class UnreachableError(TimeoutError):
    """Raised when a peer or the coordinator does not answer within the timeout."""


class StaleWorkerError(RuntimeError):
    """Raised when the others went on without this worker, which must take over from one."""


class GridPosition(NamedTuple):
    """The position of a worker in the node x local grid.

    Attributes:
      index: node · locals + local.
      nodes, locals: the size of the grid.
    """

    index: int
    nodes: int
    locals: int

    @property
    def workers(self) -> int:
        """W, the number of workers."""
        return self.nodes * self.locals

    def group(self, axes: str | tuple[str, ...]) -> list[int]:
        """The workers that differ from this one along these axes only, in order.

        >>> GridPosition(index=4, nodes=2, locals=3).group("local")
        [3, 4, 5]
        >>> GridPosition(index=4, nodes=2, locals=3).group("node")
        [1, 4]
        """
        names = (axes,) if isinstance(axes, str) else axes
        node, local = divmod(self.index, self.locals)
        nodes = range(self.nodes) if "node" in names else [node]
        locals = range(self.locals) if "local" in names else [local]
        return [n * self.locals + i for n in nodes for i in locals]


class Transport(abc.ABC):
    """One worker's calls. No call blocks; awaiting it gives its result.

    Calls to peers raise `UnreachableError` if there is no answer within the timeout. An
    engine implements the five abstract methods.

    Attributes:
      position: the worker's place in the grid.
      timeout: seconds that it waits for a worker that does not come or answer.
      mailbox: requests that peers can make while the worker computes; the methods post
        there.
      timed: sums and broadcasts whose time is simulated, or None.
    """

    position: GridPosition
    timeout: float
    mailbox: Mailbox
    timed: Any = None

    # Time

    @abc.abstractmethod
    def now(self) -> float:
        """Seconds since the run began."""

    @abc.abstractmethod
    async def step(self, compute: Callable[[], None]) -> None:
        """Computes a local step; the coroutines beside it go on meanwhile."""

    @abc.abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Lets time pass."""

    @abc.abstractmethod
    async def ask_peer(self, peer: int, call: str, *arguments: Any) -> Any:
        """Calls a method of a peer's mailbox, once it has something to answer."""

    @abc.abstractmethod
    async def ask_coordinator(self, call: str, *arguments: Any) -> Any:
        """Calls a method of the coordinator."""

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        """Runs a coroutine beside the steps."""
        task = asyncio.get_running_loop().create_task(coroutine)
        # A result that no caller awaits any more is not an error of the run.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    # Peers

    def latest(self, peer: int) -> asyncio.Task:
        """A peer's latest `Snapshot`."""
        return self.start(self._unpacked(peer, "latest"))

    def exchange(self, peer: int, vector: np.ndarray) -> asyncio.Task:
        """Moves a peer half the way to a vector: what it had before. See `Mailbox`."""
        packed = self.mailbox.count(self.mailbox.wire.pack(vector))
        return self.start(self._unpacked(peer, "exchange", packed))

    def fetch(self, peer: int, key: Hashable, part: slice = slice(None)) -> asyncio.Task:
        """The vector that a peer posts under a key, or part of it, as soon as it is there.

        Raises:
          StaleWorkerError: the peer has posted so much since that it is forgotten.
        """
        return self.start(self._unpacked(peer, "fetch", key, part))

    def contribution(self, peer: int, number: int) -> asyncio.Task:
        """A peer's part of its group's mean with this number: see `Mailbox`."""
        return self.start(self._unpacked(peer, "contribution", number))

    def state(self, peer: int) -> asyncio.Task:
        """The state from which a worker can take a peer's place: see `Mailbox.state`."""
        return self.start(self.ask_peer(peer, "state"))

    async def _unpacked(self, peer: int, call: str, *arguments: Any) -> Any:
        answer = await self.ask_peer(peer, call, *arguments)
        if isinstance(answer, str):  # `mailbox.GONE`
            raise StaleWorkerError(
                "a peer has forgotten what it had sent: it has gone on without this worker"
            )
        return self.mailbox.wire.unpack(answer)

    def post(self, key: Hashable, vector: np.ndarray) -> None:
        """Leaves a vector in the mailbox, for peers to fetch."""
        self.mailbox.post(key, vector)

    # The coordinator

    def enter(self, steps: int) -> asyncio.Task:
        """Takes part from now on, with so many steps taken: see `Coordinator.enter`."""
        return self.start(self.ask_coordinator("enter", steps))

    def claim(self, step: int) -> asyncio.Task:
        """Claims a step: a `Claim`."""
        return self.start(self.ask_coordinator("claim", step))

    def round(self, key: Hashable, value: Any, members: Sequence[int]) -> asyncio.Task:
        """A barrier: the value that each member brings, {member: value}, equal for all.

        The round closes once every live member named by all arrivals so far has arrived,
        or when one of them has waited for `timeout` seconds; members that have not arrived
        by then are absent until they are heard of again. Late arrivals receive the result
        without their contribution.

        Raises:
          StaleWorkerError: it was closed so long ago that it is forgotten.
        """
        return self.start(self._join(key, value, list(members)))

    async def _join(self, key: Hashable, value: Any, members: list[int]) -> dict[int, Any]:
        values = await self.ask_coordinator("round", key, value, members)
        if values is None:
            raise StaleWorkerError(f"the round {key} is long over")
        return values

    def missed(self, peer: int) -> asyncio.Task:
        """Reports a peer that did not answer in time: rounds do not wait for it."""
        return self.start(self.ask_coordinator("missed", peer))

    def report(self, report: Any) -> asyncio.Task:
        """Tells the coordinator a `Report`: the `Status` of all workers."""
        return self.start(self.ask_coordinator("report", report))

    def finish(self) -> asyncio.Task:
        """Tells the coordinator that this worker has taken its last step."""
        return self.start(self.ask_coordinator("finish"))
