"""What a group agrees on through ports: who leads, what the leader sends, sums, pushes."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lsgd_jax._src.asynchronous.compression import aligned
from lsgd_jax._src.asynchronous.election import lowest
from lsgd_jax._src.asynchronous.errors import Behind, Unreachable
from lsgd_jax._src.asynchronous.group import Message
from lsgd_jax._src.asynchronous.peers import Peers
from lsgd_jax._src.asynchronous.vectors import flat_of
from lsgd_jax._src.trees import Tree, widen


if TYPE_CHECKING:
    from lsgd_jax._src.asynchronous.ports import Pending, Ports

ATTEMPTS = 3  # at a sum, each without those who were lost at the one before


class Conversation:
    """Has the messages of one pull travel, one agreement after the other.

    Args:
      ports: this worker's.
      group: the workers that agree, in order.
      name: of the pull; the same for the whole group.
    """

    def __init__(self, ports: "Ports", group: Sequence[int], name: Hashable):
        self._ports, self._group, self._name = ports, list(group), name
        self._peers = Peers(group)
        self._errors: dict[Hashable, np.ndarray] = {}

    def forget(self) -> None:
        """The worker has taken over from another one: it owes nothing any more."""
        self._errors.clear()

    async def send(self, number: int, here: set[int], n: int, message: Message) -> Any:
        """The answer to the n-th message of agreement `number`, as in `Message`.

        here: the workers that take part. Who turns out to be absent is taken from them, so
          that nothing that belongs to the same communication waits for one that comes back
          in its midst: it goes on from before it, or after it.
        """
        key, members = (self._name, number, n), [i for i in self._group if i in here]
        say = getattr(self, f"_{message.kind}")
        answer, came = await say(key, members, message.content, message.static)
        here.difference_update(set(members).difference(came))
        return answer

    async def _elect(self, key: Hashable, members: list[int], score: Any, _: Any) -> Any:
        scores = await self._ports.round(key, float(score), members)
        if (me := self._ports.place.index) not in scores:
            raise Behind(f"worker {me} came too late for an election")
        leader = lowest(scores)
        position = 0 if leader is None else self._group.index(leader)
        return (np.int32(position), np.bool_(leader is not None)), scores

    async def _choose(self, key: Hashable, members: list[int], r: Any, _: Any) -> Any:
        return int(r), members

    async def _broadcast(
        self, key: Hashable, members: list[int], content: Any, _: Any
    ) -> Any:
        tree, source = content
        flat, leader = flat_of(tree), self._group[int(source)]
        mine = leader == self._ports.place.index
        vector = flat.vector(tree) if mine else None
        got = await self._ports.broadcast(key, vector, leader, members)
        return tree if got is vector else flat.tree(got), members

    async def _sum(self, key: Hashable, members: list[int], content: Any, _: Any) -> Any:
        tree, where = content
        flat, gives = flat_of(widen(tree)), bool(where)
        vector = flat.vector(tree) if gives else np.zeros([flat.size], np.float32)
        sums, count, came = await self._ports.total(
            key, vector, gives, members, self._error(key, flat.size)
        )
        return (flat.tree(sums), np.float32(count)), came

    def _error(self, key: Hashable, size: int) -> np.ndarray | None:
        """What rounding took away from this message in the agreements before."""
        if not self._ports.mailbox.wire.is_narrow:
            return None
        *_, n = cast(Any, key)
        return self._errors.setdefault(n, np.zeros([size], np.float32))

    async def _lost(self, key: Hashable, members: list[int], tree: Tree, _: Any) -> Any:
        flat = flat_of(widen(tree))
        vector = flat.vector(tree)
        return flat.tree(vector - self._ports.mailbox.wire.rounded(vector)), members

    async def _permute(
        self, key: Hashable, members: list[int], tree: Tree, permutation: Any
    ) -> Any:
        flat = flat_of(tree)
        arrived = await self._along(key, [flat.vector(tree)], permutation)
        vector = arrived[0] if arrived else np.zeros([flat.size], np.float32)
        return flat.tree(vector), members

    async def _push(
        self, key: Hashable, members: list[int], content: Any, rounds: Any
    ) -> Any:
        tree, weight, r = content
        flat = flat_of(widen(tree))
        # The weight by itself, because it must not be rounded.
        vector, own = flat.vector(tree), np.array([weight], np.float32)
        sums, mass = np.zeros([flat.size], np.float32), np.float32(0)
        for k, permutation in enumerate(rounds[int(r)]):
            arrived = await self._along((key, k), [vector, own], permutation)
            if arrived:
                sums, mass = sums + arrived[1] * arrived[0], mass + arrived[1][0]
        return (flat.tree(sums), mass), members

    async def _along(
        self, key: Hashable, vectors: list[np.ndarray], permutation: Any
    ) -> list[np.ndarray]:
        """What this worker's source sends; [] without one, or if it does not answer."""
        mine = self._group.index(self._ports.place.index)
        if any(a == mine for a, _ in permutation):
            for k, vector in enumerate(vectors):
                self._ports.post((key, k), vector)
        for a, b in permutation:
            if b == mine:
                keys: list[Hashable] = [(key, k) for k in range(len(vectors))]
                return await self._from(self._group[a], keys)
        return []

    async def _from(self, peer: int, keys: list[Hashable]) -> list[np.ndarray]:
        """What a peer sends; [] if it does not answer, or has not of late."""
        self._peers.turn()
        if not self._peers.is_tried(peer):
            return []
        asked = [self._ports.fetch(peer, key) for key in keys]
        try:
            vectors = [await fetched(pending) for pending in asked]
        except Unreachable:
            self._peers.failed(peer)
            return []
        self._peers.answered(peer)
        return vectors


async def all_reduce(
    ports: "Ports",
    key: Hashable,
    vector: np.ndarray,
    gives: bool,
    group: Sequence[int],
    error: np.ndarray | None = None,
) -> tuple[np.ndarray, int, list[int]]:
    """The sum of the vectors of those who give, how many they are, and who came.

    All of this is equal for all.

    Each worker adds up a slice of the vector and sends it to the others, as a ring would:
    2 (W - 1) / W vectors leave each worker. Before and after, all come to a round: what the
    sum is made of, and whether it has arrived, is decided there, once for all. If one is
    lost on the way the rest begin anew without it.

    Args:
      ports: this worker's.
      key: of this sum; the same for all.
      vector: float32 [n].
      gives: whether this worker's vector counts.
      group: the workers that come.
      error: float32 [n], what rounding has taken away of what this worker sent to the sums
        before, from its vectors and from its slices of the sums: it is added to what is
        sent now, and renewed in place. 0 at first; None: it is lost.

    Raises:
      Behind: the others have finished without this worker.
      Unreachable: too many were lost.
    """
    me = ports.place.index
    owed = vector if error is None else vector + error
    vector = ports.mailbox.rounded(owed)
    for attempt in range(ATTEMPTS):
        here = (key, attempt)
        ports.post(here, vector)
        came = await ports.round((here, "came"), gives, list(group))
        if me not in came:
            raise Behind(f"worker {me} came too late for a sum")
        givers = [i for i, gave in came.items() if gave]
        try:
            sums, mine, lost = await _slices(ports, here, vector, givers, list(came))
        except Unreachable:
            sums, mine, lost = None, slice(0), np.float32(0)
        done = await ports.round((here, "done"), sums is not None, list(came))
        if all(done.values()):
            if sums is None:
                sums = await _whole(ports, here, list(done))
            elif len(done) < len(came):
                ports.post((here, "all"), sums)  # for those who may lack a part of it
            ports.mailbox.drop(here)
            ports.mailbox.drop((here, "sum"))
            if error is not None:
                error[:] = owed - vector if gives else 0
                error[mine] += lost if gives else 0
            return sums, len(givers), list(done)
        group = list(done)
    raise Unreachable(f"worker {me} lost others in {ATTEMPTS} attempts at a sum")


async def _slices(
    ports: "Ports",
    key: Hashable,
    vector: np.ndarray,
    givers: Sequence[int],
    owners: Sequence[int],
) -> tuple[np.ndarray, slice, np.ndarray]:
    """The givers' sum, the slice that this worker adds up, what rounding took of that."""
    me = ports.place.index

    async def from_peers(pending: Mapping[int, "Pending"]) -> dict[int, np.ndarray]:
        """What comes from all. Each begins with another one, so that no link is crowded."""
        arrived = {}
        for i in sorted(pending, key=lambda i: (i < me, i)):
            try:
                arrived[i] = await fetched(pending[i])
            except Unreachable:
                await ports.missed(i)  # so that no worker waits for it again
                raise
        return arrived

    mine = aligned(len(vector), len(owners))[list(owners).index(me)]
    parts = await from_peers({i: ports.fetch(i, key, mine) for i in givers if i != me})
    total = np.zeros([mine.stop - mine.start], np.float32)
    for i in givers:
        total = total + (vector[mine] if i == me else parts[i])
    exact, total = total, ports.mailbox.rounded(total)
    ports.post((key, "sum"), total)
    sums = await from_peers({i: ports.fetch(i, (key, "sum")) for i in owners if i != me})
    whole = np.concatenate([total if i == me else sums[i] for i in owners])
    return whole, mine, exact - total


async def _whole(ports: "Ports", key: Hashable, owners: Sequence[int]) -> np.ndarray:
    """A sum that others have finished, from one of them."""
    for i in owners:
        try:
            return await fetched(ports.fetch(i, (key, "all")))
        except Unreachable:
            continue
    raise Behind(f"worker {ports.place.index} lacks a part of a sum that the others have")


async def fetched(pending: "Pending") -> np.ndarray:
    """The vector that a fetch gives.

    Raises:
      Behind: the peer has gone on for so long that it is forgotten.
    """
    if isinstance(vector := await pending, str):
        raise Behind(
            "what a peer had sent is forgotten: it has gone on without this worker"
        )
    return vector
