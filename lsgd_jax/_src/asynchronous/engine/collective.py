"""Sums, gathers and broadcasts among asynchronous workers.

Before and after the arrays of a sum or a gather travel, all members join a round. It
decides, for all of them alike, which workers take part and whether everything has arrived.
If a worker fails in between, the others start again without it.
"""

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lsgd_jax._src.asynchronous.engine.contents import as_vector, of_vector
from lsgd_jax._src.asynchronous.engine.errors import StaleWorkerError, UnreachableError
from lsgd_jax._src.trees import Tree


ATTEMPTS = 3  # each without the workers that failed in the previous one


class Collectives:
    """The collectives of one worker, by messages between its transport and others.

    An engine may replace them by others with the same results.

    Args:
      transport: this worker's `Transport`.
    """

    def __init__(self, transport: Any):
        self._transport = transport
        self._mailbox = transport.mailbox
        self._me = transport.position.index

    async def all_gather(
        self, key: Hashable, content: Any, group: Sequence[int]
    ) -> dict[int, Any]:
        """Returns {member: content} for all members that came, the same for all of them.

        Raises:
          StaleWorkerError: the others have finished without this worker.
          UnreachableError: too many failed.
        """

        async def collect(here: Hashable, came: Mapping[int, Any]) -> dict[int, Any]:
            others = await self._from_peers({i: here for i in came if i != self._me})
            return {i: content if i == self._me else others[i] for i in came}

        rows, _, _ = await self._together(key, content, None, group, collect)
        return rows

    async def gather_small(
        self, key: Hashable, content: Any, group: Sequence[int]
    ) -> dict[int, Any]:
        """`all_gather` of contents that travel with a round of the coordinator."""
        rows = await self._transport.round(key, content, group)
        if self._me not in rows:
            raise StaleWorkerError(f"worker {self._me} came too late for a gather")
        return rows

    async def all_reduce(
        self, key: Hashable, tree: Tree, gives: bool, group: Sequence[int]
    ) -> tuple[Tree, int, list[int]]:
        """Returns the sum of the trees of the workers that give, their number, the members.

        It is computed in float32 or wider. The results are the same for all members.

        Args:
          key: of this sum; the same for all members.
          tree: arrays of one structure.
          gives: whether this worker's tree counts.
          group: the workers that come.

        Raises:
          StaleWorkerError: the others have finished without this worker.
          UnreachableError: too many failed.
        """
        # All chunks are sums in one dtype, wide enough for each of the leaves.
        dtype = np.result_type(np.float32, *(x.dtype for x in jax.tree.leaves(tree)))
        vector = as_vector(tree, dtype)
        given = vector if gives else np.zeros_like(vector)
        sums, count, came = await self._sum(key, given, gives, group)
        return of_vector(sums, tree), count, came

    async def broadcast(
        self, key: Hashable, content: Any, source: int, group: Sequence[int]
    ) -> Any:
        """Returns the content of `source`, to all of its group."""
        if self._me != source:
            return await self._transport.ask(source, "fetch", key)
        self._mailbox.post(key, content)
        return content

    async def _sum(
        self, key: Hashable, vector: np.ndarray, gives: bool, group: Sequence[int]
    ) -> tuple[np.ndarray, int, list[int]]:
        """`all_reduce` of one vector.

        Each worker adds up a chunk of it and sends this to the others: 2 (W - 1) / W
        vectors leave each worker, as in a ring.
        """

        async def collect(here: Hashable, came: Mapping[int, bool]) -> np.ndarray:
            me = self._me
            givers = [i for i, gave in came.items() if gave]
            bounds = np.linspace(0, len(vector), len(came) + 1).astype(int)
            mine = slice(*bounds[list(came).index(me) :][:2])
            parts = await self._from_peers({i: here for i in givers if i != me}, mine)
            total = np.zeros([mine.stop - mine.start], vector.dtype)
            for i in givers:
                total = total + (vector[mine] if i == me else parts[i])
            self._mailbox.post((here, "sum"), total)
            sums = await self._from_peers({i: (here, "sum") for i in came if i != me})
            return np.concatenate([total if i == me else sums[i] for i in came])

        sums, came, done = await self._together(key, vector, gives, group, collect)
        return sums, sum(came.values()), done

    async def _together(
        self,
        key: Hashable,
        content: Any,
        value: Any,
        group: Sequence[int],
        collect: Callable[[Hashable, dict[int, Any]], Awaitable[Any]],
    ) -> tuple[Any, dict[int, Any], list[int]]:
        """Returns the result of `collect`, the members' values, and the members left.

        Args:
          content: posted under the key of the attempt, for the others to fetch.
          value: this worker's value in the first round.
          collect: (key, {member: value}) -> result, the same for all members.
        """
        me = self._me
        transport = self._transport
        members = list(group)
        for attempt in range(ATTEMPTS):
            here = (key, attempt)
            self._mailbox.post(here, content)
            came = await transport.round((here, "came"), value, members)
            if me not in came:
                raise StaleWorkerError(f"worker {me} came too late for a sum")
            try:
                result = await collect(here, came)
            except UnreachableError:
                result = None
            done = await transport.round((here, "done"), result is not None, list(came))
            if me not in done or (all(done.values()) and result is None):
                raise StaleWorkerError(f"worker {me} lacks a part that the others have")
            if all(done.values()):
                self._mailbox.drop(here)
                self._mailbox.drop((here, "sum"))
                return result, came, list(done)
            members = list(done)
        raise UnreachableError(f"worker {me} lost others in {ATTEMPTS} attempts at a sum")

    async def _from_peers(
        self, keys: Mapping[int, Hashable], part: slice = slice(None)
    ) -> dict[int, Any]:
        """Returns the contents that peers have posted under some keys."""
        me = self._me
        transport = self._transport
        arrived = {}
        # Each worker begins with another peer, so that no link is crowded.
        order = sorted(keys, key=lambda i: (i < me, i))
        pending = {i: transport.ask(i, "fetch", keys[i], part) for i in order}
        for i, content in pending.items():
            try:
                arrived[i] = await content
            except UnreachableError:
                await transport.tell("missed", i)  # so that no worker waits for it again
                raise
        return arrived
