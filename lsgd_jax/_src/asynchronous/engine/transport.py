"""The calls that one worker can make to its peers and to the coordinator.

An engine (Ray, the simulator) implements `Transport` for each worker. The methods are
coroutines on one asyncio loop per worker on Ray, and on one loop of virtual time in the
simulator. A call starts at once and returns an `asyncio.Task`.
"""

import abc
import asyncio
import functools
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, NamedTuple

from lsgd_jax._src.asynchronous.engine.collective import Collectives
from lsgd_jax._src.asynchronous.engine.contents import unpack
from lsgd_jax._src.asynchronous.engine.errors import StaleWorkerError
from lsgd_jax._src.asynchronous.engine.mailbox import GONE, Mailbox
from lsgd_jax._src.trees import Tree


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
        """Returns the workers that differ from this one along these axes only, in order.

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


def retrieved(future: asyncio.Future) -> None:
    """Marks an exception as handled: one that no caller awaits is no error of the run."""
    future.cancelled() or future.exception()


class Transport(abc.ABC):
    """One worker's calls. No call blocks; awaiting it gives its result.

    An engine implements the four abstract methods.

    Attributes:
      position: the worker's position in the grid.
      timeout: seconds that it waits for a worker that does not come or answer.
      mailbox: answers the requests of peers while the worker computes.
    """

    position: GridPosition
    timeout: float
    mailbox: Mailbox

    @functools.cached_property
    def collectives(self) -> Collectives:
        """Sums, gathers and broadcasts; an engine may have its own."""
        return Collectives(self)

    @abc.abstractmethod
    def now(self) -> float:
        """Returns the seconds since the run began."""

    @abc.abstractmethod
    async def step(self, compute: Callable[[], None]) -> None:
        """Computes a local step, while the calls in flight go on."""

    @abc.abstractmethod
    async def ask_peer(self, peer: int, call: str, *arguments: Any) -> Any:
        """Calls a method of a peer's mailbox; returns its answer, still packed."""

    @abc.abstractmethod
    async def ask_coordinator(self, call: str, *arguments: Any) -> Any:
        """Calls a method of the coordinator."""

    async def moved(self) -> Tree:
        """Returns the moves that peers have left in this mailbox, see `Mailbox.moved`."""
        return self.mailbox.moved()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        """Runs a coroutine in the background, while the worker takes steps."""
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(retrieved)
        return task

    def ask(self, peer: int, call: str, *arguments: Any) -> asyncio.Task:
        """Calls a method of a peer's mailbox once that has something to answer.

        Args:
          peer: the worker to ask.
          call: 'latest', 'exchange', 'fetch', 'contribution' or 'state', see `Mailbox`.
          arguments: of the call.

        Raises:
          UnreachableError: the peer does not answer within the timeout.
          StaleWorkerError: the peer has posted so much since that it has forgotten this.
        """
        return self.start(self._unpacked(peer, call, *arguments))

    async def _unpacked(self, peer: int, call: str, *arguments: Any) -> Any:
        answer = await self.ask_peer(peer, call, *arguments)
        if isinstance(answer, str) and answer == GONE:
            raise StaleWorkerError(
                "a peer has forgotten what it had sent: it has gone on without this worker"
            )
        return unpack(answer)

    def tell(self, call: str, *arguments: Any) -> asyncio.Task:
        """Calls a method of the `Coordinator` on behalf of this worker.

        Args:
          call: 'enter', 'claim', 'missed', 'report' or 'finish'.
          arguments: of the call, but for the worker's index.
        """
        return self.start(self.ask_coordinator(call, *arguments))

    def round(self, key: Hashable, value: Any, members: Sequence[int]) -> asyncio.Task:
        """Joins a round (a barrier): {member: value}, the same for all members.

        The round closes once every live member named by all arrivals so far has arrived,
        or when one of them has waited for `timeout` seconds. Members that have not arrived
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
