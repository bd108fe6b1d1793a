"""Collectives whose time is that of a ring, see `Links.circulate`.

One of the members computes the result for all of them, and no messages are simulated. So a
sum costs 2 W events instead of W².
"""

import asyncio
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.engine.collective import Collectives
from lsgd_jax._src.asynchronous.engine.contents import nbytes
from lsgd_jax._src.asynchronous.engine.errors import StaleWorkerError, UnreachableError
from lsgd_jax._src.asynchronous.engine.transport import Transport, retrieved


@dataclasses.dataclass
class Meeting:
    """The contributions to a collective by member, and the call of its result."""

    brought: dict[int, Any] = dataclasses.field(default_factory=dict)
    result: asyncio.Future | None = None


class Rings(Collectives):
    """Collectives of one worker that begin when the last member has arrived.

    Sums always take the time of a ring. Broadcasts and small gathers do so if the
    simulation says so, like in a synchronous program.

    Args:
      transport: this worker's.
      simulation: the `Simulation`.
    """

    def __init__(self, transport: Transport, simulation: Any):
        super().__init__(transport)
        self._simulation = simulation

    async def gather_small(
        self, key: Hashable, content: Any, group: Sequence[int]
    ) -> dict[int, Any]:
        if not self._simulation.collectives:
            return await super().gather_small(key, content, group)
        return await self._circulate(key, content, group, dict)

    async def broadcast(
        self, key: Hashable, content: Any, source: int, group: Sequence[int]
    ) -> Any:
        """It takes the time of a sum of one content and of zeros."""
        if not self._simulation.collectives:
            return await super().broadcast(key, content, source, group)
        return await self._circulate(key, content, group, lambda values: values.get(source))

    async def _sum(
        self, key: Hashable, vector: np.ndarray, gives: bool, group: Sequence[int]
    ) -> tuple[np.ndarray, int, list[int]]:
        def add(values: dict[int, Any]) -> tuple[np.ndarray, int, list[int]]:
            givers = [given for given in values.values() if given is not None]
            return sum(givers, np.zeros_like(vector)), len(givers), list(values)

        return await self._circulate(key, vector if gives else None, group, add)

    async def _circulate(
        self,
        key: Hashable,
        value: Any,
        group: Sequence[int],
        combine: Callable[[dict[int, Any]], Any],
    ) -> Any:
        """Returns the result that a group makes of {member: value}, once it has traveled.

        The coordinator is given no values, since it would remember them.
        """
        me = self._me
        meetings = self._simulation.meetings
        meeting = meetings.setdefault(key, Meeting())
        meeting.brought[me] = value
        came = await self._simulation.coordinator.round(me, key, None, group)
        if came is None or me not in came or not meeting.brought.keys() >= set(came):
            meetings.pop(key, None)
            raise StaleWorkerError(f"worker {me} came too late for {key}")
        if meeting.result is None:
            values = {i: meeting.brought[i] for i in came}
            meeting.result = asyncio.ensure_future(self._traveled(key, values, combine))
            meeting.result.add_done_callback(retrieved)
            # Until then a member that has failed may come back to the same meeting.
            meeting.result.add_done_callback(lambda _: meetings.pop(key, None))
        return await asyncio.shield(meeting.result)

    async def _traveled(
        self,
        key: Hashable,
        values: dict[int, Any],
        combine: Callable[[dict[int, Any]], Any],
    ) -> Any:
        simulation = self._simulation
        came = list(values)
        timeout = self._transport.timeout
        result = combine(values)
        if result is None:
            raise UnreachableError(f"the source of {key} has failed")
        size = nbytes(result)
        for i in came:
            sent = round(2 * (len(came) - 1) / len(came) * size)
            simulation.transports[i].mailbox.bytes_sent += sent
        if not await simulation.links.circulate(came, size, simulation.now() + timeout):
            raise UnreachableError(f"{key} did not end within {timeout:g} s")
        return result
