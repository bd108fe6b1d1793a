"""A pull's messages as they travel between asynchronous workers: see `messages.Message`.

Arrays travel as the bytes of one buffer, because a call costs more than its bytes.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from lsgd_jax._src.asynchronous.collective import all_gather, all_reduce, broadcast
from lsgd_jax._src.asynchronous.free_running import Peers
from lsgd_jax._src.asynchronous.messages import Message
from lsgd_jax._src.asynchronous.transport import (
    StaleWorkerError,
    Transport,
    UnreachableError,
)
from lsgd_jax._src.trees import Tree


SMALL = 64  # elements; what has no more of them travels with the round of the coordinator


def as_bytes(tree: Tree) -> np.ndarray:
    """All arrays of a tree one after the other, uint8 [n]."""
    leaves = [np.ascontiguousarray(x).reshape(-1) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.view(np.uint8) for x in leaves] or [np.zeros(0, np.uint8)])


def of_bytes(buffer: np.ndarray, like: Tree) -> Tree:
    """The tree of such bytes, on the same memory; `like` has its shapes and dtypes.

    >>> tree = {"a": np.ones(2, np.float32), "b": np.array([[1, 2]], np.int8)}
    >>> of_bytes(as_bytes(tree), tree)["b"].tolist()
    [[1, 2]]
    """
    leaves, treedef = jax.tree.flatten(like)
    ends = np.cumsum([0, *(x.nbytes for x in leaves)])
    return treedef.unflatten(
        buffer[a:b].view(x.dtype).reshape(x.shape)
        for a, b, x in zip(ends, ends[1:], leaves)
    )


class Conversation:
    """The messages of one pull, one agreement after the other.

    Args:
      transport: this worker's.
      group: the workers that agree, in order.
      name: of the pull; the same for the whole group.
    """

    def __init__(self, transport: Transport, group: Sequence[int], name: Hashable):
        self._transport, self._group, self._name = transport, list(group), name
        self._peers = Peers(group)

    async def send(self, number: int, here: set[int], n: int, message: Message) -> Any:
        """The answer to the n-th message of agreement `number`, as in `Message`.

        here: the workers that take part. Absent workers are taken from it, so that no later
          message of the same communication waits for a worker that comes back in its midst:
          such a worker goes on from before it, or after it.
        """
        key, members = (self._name, number, n), [i for i in self._group if i in here]
        say = getattr(self, f"_{message.kind}")
        answer, came = await say(key, members, message.content, message.static)
        here.difference_update(set(members).difference(came))
        return answer

    async def _choose(self, key: Hashable, members: list[int], r: Any, _: Any) -> Any:
        return int(r), members

    async def _gather(self, key: Hashable, members: list[int], x: Any, _: Any) -> Any:
        x, me = np.asarray(x), self._transport.position.index
        if x.size <= SMALL:
            rows = await self._transport.round(key, x, members)
        else:
            sent = await all_gather(self._transport, key, as_bytes(x), members)
            rows = {i: of_bytes(row, x) for i, row in sent.items()}
        if me not in rows:
            raise StaleWorkerError(f"worker {me} came too late for what all gather")
        is_float = not np.issubdtype(x.dtype, np.integer) and x.dtype != bool
        absent = np.full_like(x, np.nan if is_float else 0)
        return np.stack([rows.get(i, absent) for i in self._group]), rows

    async def _broadcast(
        self, key: Hashable, members: list[int], content: Any, _: Any
    ) -> Any:
        tree, source = content
        leader = self._group[int(source)]
        if leader == self._transport.position.index:
            await broadcast(self._transport, key, as_bytes(tree), leader, members)
            return tree, members
        got = await broadcast(self._transport, key, None, leader, members)
        return of_bytes(got, tree), members

    async def _sum(self, key: Hashable, members: list[int], content: Any, _: Any) -> Any:
        tree, where = content
        leaves, treedef = jax.tree.flatten(tree)
        dtype = np.result_type(np.float32, *(x.dtype for x in leaves))
        flat = [np.ravel(x).astype(dtype) for x in leaves]
        vector = np.concatenate(flat or [np.zeros(0, dtype)])
        gives = bool(where)
        sums, count, came = await all_reduce(
            self._transport, key, vector if gives else np.zeros_like(vector), gives, members
        )
        ends = np.cumsum([0, *(x.size for x in leaves)])
        total = treedef.unflatten(
            sums[a:b].reshape(x.shape).astype(x.dtype)
            for a, b, x in zip(ends, ends[1:], leaves)
        )
        return (total, np.float32(count)), came

    async def _permute(
        self, key: Hashable, members: list[int], tree: Tree, permutation: Any
    ) -> Any:
        mine = self._group.index(self._transport.position.index)
        if any(a == mine for a, _ in permutation):
            self._transport.post(key, as_bytes(tree))
        nothing = jax.tree.map(np.zeros_like, tree)
        for a, b in permutation:
            if b == mine and (got := await self._from(self._group[a], key)) is not None:
                return of_bytes(got, tree), members
        return nothing, members

    async def _from(self, peer: int, key: Hashable) -> np.ndarray | None:
        """The bytes that a peer sends; None if it does not answer, or has not of late."""
        self._peers.turn()
        if not self._peers.is_tried(peer):
            return None
        try:
            buffer = await self._transport.fetch(peer, key)
        except UnreachableError:
            self._peers.failed(peer)
            return None
        self._peers.answered(peer)
        return buffer
