"""Sums and gathers of vectors among asynchronous workers.

Before and after the vectors travel, all members join a round. It decides, for all of them
alike, which workers take part and whether every vector has arrived. If a worker fails in
between, the others start again without it.
"""

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.engine.transport import (
    StaleWorkerError,
    Transport,
    UnreachableError,
)


ATTEMPTS = 3  # each without the workers that failed in the previous one


async def all_gather(
    transport: Transport, key: Hashable, vector: np.ndarray, group: Sequence[int]
) -> dict[int, np.ndarray]:
    """Returns {member: vector} for all members that came, the same for all of them.

    Raises:
      StaleWorkerError: the others have finished without this worker.
      UnreachableError: too many failed.
    """

    async def collect(here: Hashable, came: Mapping[int, Any]) -> dict[int, np.ndarray]:
        me = transport.position.index
        others = await _from_peers(transport, {i: here for i in came if i != me})
        return {i: vector if i == me else others[i] for i in came}

    rows, _, _ = await _together(transport, key, vector, None, group, collect)
    return rows


async def all_reduce(
    transport: Transport,
    key: Hashable,
    vector: np.ndarray,
    gives: bool,
    group: Sequence[int],
    error: np.ndarray | None = None,
) -> tuple[np.ndarray, int, list[int]]:
    """Returns the sum of the vectors of the workers that give, their number, the members.

    The results are the same for all members. In float32 each worker adds up a chunk of the
    vector and sends it to the others: 2 (W - 1) / W vectors leave each worker, as in a
    ring. In a narrow wire format whole vectors are gathered and added in one order.

    Args:
      transport: this worker's.
      key: of this sum; the same for all members.
      vector: float32 [n].
      gives: whether this worker's vector counts.
      group: the workers that come.
      error: float32 [n], the quantization error of this worker's earlier messages, 0 at
        first. It is added to the vector and updated in place. Defaults to no feedback.

    Raises:
      StaleWorkerError: the others have finished without this worker.
      UnreachableError: too many failed.
    """
    me, mailbox = transport.position.index, transport.mailbox
    if transport.timed is not None and not mailbox.is_narrow:
        return await transport.timed.sum(key, vector, gives, group)
    owed = vector if error is None else vector + error
    sent, arrived = mailbox.encoded(owed)

    async def collect(here: Hashable, came: Mapping[int, bool]) -> np.ndarray:
        givers = [i for i, gave in came.items() if gave]
        if not mailbox.is_narrow:
            return await _in_chunks(transport, here, arrived, givers, list(came))
        others = await _from_peers(transport, {i: here for i in givers if i != me})
        rows = [arrived if i == me else others[i] for i in givers]
        return sum(rows[1:], rows[0]) if rows else np.zeros_like(arrived)

    sums, came, done = await _together(transport, key, sent, gives, group, collect)
    if error is not None:
        error[:] = owed - arrived if gives else 0
    return sums, sum(came.values()), done


async def broadcast(
    transport: Transport,
    key: Hashable,
    vector: np.ndarray | None,
    source: int,
    group: Sequence[int],
) -> np.ndarray:
    """Returns the vector of `source`, to all of its group.

    vector: at the source; None at all other workers.
    """
    if transport.timed is not None and transport.timed.is_collective:
        return await transport.timed.broadcast(key, vector, source, group)
    if vector is None:
        return await transport.ask(source, "fetch", key)
    transport.mailbox.post(key, vector)
    return vector


async def _together(
    transport: Transport,
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
    me, mailbox, members = transport.position.index, transport.mailbox, list(group)
    for attempt in range(ATTEMPTS):
        here = (key, attempt)
        mailbox.post(here, content)
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
            mailbox.drop(here)
            mailbox.drop((here, "sum"))
            return result, came, list(done)
        members = list(done)
    raise UnreachableError(f"worker {me} lost others in {ATTEMPTS} attempts at a sum")


async def _in_chunks(
    transport: Transport,
    key: Hashable,
    vector: np.ndarray,
    givers: Sequence[int],
    owners: Sequence[int],
) -> np.ndarray:
    """Returns the givers' sum: each owner adds up a chunk and sends it to the others."""
    me = transport.position.index
    bounds = np.linspace(0, len(vector), len(owners) + 1).astype(int)
    mine = slice(*bounds[list(owners).index(me) :][:2])
    parts = await _from_peers(transport, {i: key for i in givers if i != me}, mine)
    total = np.zeros([mine.stop - mine.start], vector.dtype)
    for i in givers:
        total = total + (vector[mine] if i == me else parts[i])
    transport.mailbox.post((key, "sum"), total)
    sums = await _from_peers(transport, {i: (key, "sum") for i in owners if i != me})
    return np.concatenate([total if i == me else sums[i] for i in owners])


async def _from_peers(
    transport: Transport, keys: Mapping[int, Hashable], part: slice = slice(None)
) -> dict[int, np.ndarray]:
    """Returns the vectors that peers have posted under some keys."""
    me, arrived = transport.position.index, {}
    # Each worker begins with another peer, so that no link is crowded.
    order = sorted(keys, key=lambda i: (i < me, i))
    pending = {i: transport.ask(i, "fetch", keys[i], part) for i in order}
    for i, vector in pending.items():
        try:
            arrived[i] = await vector
        except UnreachableError:
            await transport.tell("missed", i)  # so that no worker waits for it again
            raise
    return arrived
