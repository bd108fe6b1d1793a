"""One worker's transport in a simulation: calls take the time of the network."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.compression import Compression
from lsgd_jax._src.asynchronous.mailbox import Mailbox
from lsgd_jax._src.asynchronous.transport import (
    GridPosition,
    StaleWorkerError,
    Transport,
    UnreachableError,
)
from lsgd_jax._src.asynchronous.worker import Method


class SimulatedMailbox(Mailbox):
    """A mailbox that tells coroutines when there is more in it."""

    def __init__(self, wire: Compression):
        super().__init__(wire)
        self._awaited: dict[Hashable, asyncio.Future] = {}

    def show(self, *arguments: Any, **options: Any) -> None:
        super().show(*arguments, **options)
        self._tell(None)

    def post(self, key: Hashable, vector: Any) -> None:
        super().post(key, vector)
        self._tell(key)

    def more(self, key: Hashable | None) -> asyncio.Future:
        """Done when something is posted under a key, or shown (None)."""
        if key not in self._awaited:
            self._awaited[key] = asyncio.get_running_loop().create_future()
        return self._awaited[key]

    def _tell(self, key: Hashable | None) -> None:
        if (future := self._awaited.pop(key, None)) is not None:
            future.set_result(None)


class SimulatedTransport(Transport):
    """One worker's transport. Sums, and on demand broadcasts, take a collective's time."""

    mailbox: Any

    def __init__(self, simulation: Any, position: GridPosition, method: Method):
        self.position, self.timeout = position, simulation.timeout
        self._simulation, self._index = simulation, position.index
        self.mailbox = SimulatedMailbox(Compression(method.wire, position.index))
        self.timed, self.is_collective = self, simulation.collectives

    def now(self) -> float:
        return self._simulation.now()

    async def step(self, compute: Callable[[], None]) -> None:
        compute()
        await self.sleep(self._simulation.seconds[self._index]())
        while self._index in self._simulation.hung:
            await self.sleep(self.timeout)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        return self._simulation.own(self._index, super().start(coroutine))

    # Peers

    async def ask_peer(self, peer: int, call: str, *arguments: Any) -> Any:
        """The request travels, the peer answers as soon as it can, the answer travels."""
        simulation, me = self._simulation, self._index
        limit = self.now() + self.timeout
        is_lost = simulation.loss and simulation.random.random() < simulation.loss
        size = Compression.nbytes(arguments)
        came = await simulation.links.send(me, peer, size, limit)
        key, answer = arguments[0] if call == "fetch" else None, None
        while came and not is_lost and peer not in simulation.down:
            mailbox = simulation.transports[peer].mailbox
            if (answer := getattr(mailbox, call)(*arguments)) is not None:
                break
            try:
                more = asyncio.shield(mailbox.more(key))
                await asyncio.wait_for(more, limit - self.now())
            except TimeoutError:
                break
        if answer is not None:
            if await simulation.links.send(peer, me, Compression.nbytes(answer), limit):
                return answer
        await self.sleep(max(limit - self.now(), 0))
        raise UnreachableError(f"worker {peer} did not answer within {self.timeout:g} s")

    # Groups, in the time of a collective that begins when the last member has come

    async def sum(
        self, key: Hashable, vector: np.ndarray, gives: bool, group: Sequence[int]
    ) -> tuple[np.ndarray, int, list[int]]:
        """As `all_reduce`, in the time of a ring."""

        def add(brought: dict[int, Any]) -> tuple[np.ndarray, int, list[int]]:
            givers = [given for given in brought.values() if given is not None]
            return sum(givers, np.zeros_like(vector)), len(givers), list(brought)

        given = vector if gives else None
        return await self._collective(("total", key), given, group, add)

    async def broadcast(
        self, key: Hashable, vector: np.ndarray | None, source: int, group: Sequence[int]
    ) -> np.ndarray:
        """As `collective.broadcast`, in the time of a sum of one vector and of zeros."""
        return await self._collective(
            ("of", key), vector, group, lambda brought: brought.get(source)
        )

    async def _collective(
        self,
        key: Hashable,
        value: Any,
        group: Sequence[int],
        combine: Callable[[dict[int, Any]], Any],
    ) -> Any:
        """The result that a group makes of what its members bring."""
        simulation = self._simulation

        async def conclude(brought: dict[int, Any]) -> Any:
            result, came = combine(brought), list(brought)
            if result is None:
                raise UnreachableError(f"the source of {key} has failed")
            size = Compression.nbytes(result)
            each = round(2 * (len(came) - 1) / len(came) * size)
            for i in came:
                simulation.transports[i].mailbox.bytes_sent += each
            limit = simulation.now() + self.timeout
            if not await simulation.links.circulate(came, size, limit):
                raise UnreachableError(f"{key} did not end within {self.timeout:g} s")
            return (result,)

        ended = await simulation.meet(key, self._index, value, group, conclude)
        if ended is None:
            raise StaleWorkerError(f"worker {self._index} came too late for {key}")
        return ended[0]

    # The coordinator

    async def ask_coordinator(self, call: str, *arguments: Any) -> Any:
        simulation, me = self._simulation, self._index
        if call == "round" and simulation.collectives:
            key, value, members = arguments
            together = lambda brought: brought
            return await self._collective(key, value, members, together)
        await self._to_coordinator()
        await simulation.serve()
        if call == "round":
            key, value, members = arguments
            answer = await simulation.meet(key, me, value, members)
        elif call == "missed":
            answer = simulation.leave(*arguments)
        elif call == "finish":
            answer = simulation.leave(me, finished=True)
        else:
            answer = getattr(simulation.coordinator, call)(me, *arguments)
        await self._to_coordinator()
        return answer

    async def _to_coordinator(self) -> None:
        """A small message to the node of worker 0, or back."""
        await self._simulation.links.send(self._index, 0, 0, math.inf)
