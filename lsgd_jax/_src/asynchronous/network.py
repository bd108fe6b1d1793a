"""A simulated network: the time of messages that share its links."""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lsgd_jax._src.asynchronous.clock import later


SMALL = 4096  # bytes; messages up to this size take no bandwidth
SOON = 1e-9  # seconds; a transfer that ends within them ends now


@dataclasses.dataclass(frozen=True)
class Network:
    """The links between nodes, and between the workers of a node; all full duplex.

    Bandwidths may be inf, both at once: then only latencies take time.

    Args:
      bandwidth: bytes per second of a node's link, in each direction.
      latency: seconds from node to node.
      inside_bandwidth: bytes per second of each worker's link to the others of its node.
      inside_latency: seconds from worker to worker inside a node.
      overhead: seconds of software around a message, at its sender.
      coordinator: seconds in which the coordinator serves a call, one after the other.

    Raises:
      ValueError: a bandwidth that is not positive, a time that is negative.

    >>> Network.named("ethernet-1g").bandwidth
    117500000.0
    >>> Network.named("ethernet")
    Traceback (most recent call last):
    ValueError: `network` must be one of ethernet-100m, ethernet-1g, ethernet-10g,
    ethernet-25g, infiniband-100g, wan-100m, wan-1g, free, got network='ethernet'
    """

    bandwidth: float
    latency: float
    inside_bandwidth: float = 10e9
    inside_latency: float = 10e-6
    overhead: float = 0.0
    coordinator: float = 0.0

    def __post_init__(self):
        for name in ("bandwidth", "inside_bandwidth"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"`{name}` must be positive, got {name}={value}")
        if math.isinf(self.bandwidth) != math.isinf(self.inside_bandwidth):
            raise ValueError(
                "`bandwidth` and `inside_bandwidth` must both be inf or none, got "
                f"bandwidth={self.bandwidth}, inside_bandwidth={self.inside_bandwidth}"
            )
        for name in ("latency", "inside_latency", "overhead", "coordinator"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be at least 0, got {name}={value}")

    @classmethod
    def named(cls, name: str) -> "Network":
        """Returns one of the `NETWORKS`."""
        if name not in NETWORKS:
            known = ", ".join(NETWORKS)
            raise ValueError(f"`network` must be one of {known}, got network={name!r}")
        return NETWORKS[name]

    def delay(self, is_inside: bool, size: float = 0.0) -> float:
        """Returns the seconds of a message on idle links."""
        if is_inside:
            return self.overhead + self.inside_latency + size / self.inside_bandwidth
        return self.overhead + self.latency + size / self.bandwidth


def _ethernet(gigabits: float, latency: float) -> Network:
    """TCP carries 1,448 of each 1,538 bytes on the wire."""
    return Network(bandwidth=0.94 * gigabits * 1e9 / 8, latency=latency)


NETWORKS: Mapping[str, Network] = {
    "ethernet-100m": _ethernet(0.1, 200e-6),
    "ethernet-1g": _ethernet(1, 100e-6),
    "ethernet-10g": _ethernet(10, 50e-6),
    "ethernet-25g": _ethernet(25, 30e-6),
    "infiniband-100g": Network(bandwidth=12e9, latency=2e-6),
    "wan-100m": _ethernet(0.1, 20e-3),
    "wan-1g": _ethernet(1, 20e-3),
    "free": Network(math.inf, 0.0, math.inf, 0.0),
}


class Transfer:
    """Bytes in flight over one or several pairs of links.

    Attributes:
      arrived: a future of whether all of them have arrived.
      left: number of pairs of links that still carry some of them.
    """

    def __init__(self, left: int):
        self.arrived = asyncio.get_running_loop().create_future()
        self.left = left


class Links:
    """All links of a cluster, and the flows that they carry.

    The flows on a link share it equally. A flow over two links has the lower of its two
    shares; the rest of the other share stays unused.

    Args:
      network: bandwidths and latencies.
      nodes, locals: the grid of workers.

    Attributes:
      sent: bytes that have left each node, [nodes].
      stuck: workers whose flows have stopped for good.
    """

    def __init__(self, network: Network, nodes: int, locals: int):
        self.network, self._locals = network, locals
        workers = nodes * locals
        self._capacity = np.repeat(
            [network.bandwidth, network.inside_bandwidth], [2 * nodes, 2 * workers]
        )
        self._nodes, self._workers = nodes, workers
        self.sent, self.stuck = np.zeros(nodes), set[int]()
        self._transfers: list[Transfer] = []
        self._ends = np.zeros([0, 2], int)  # the two links of each flow
        self._between = np.zeros([0, 2], int)  # its two workers
        self._remaining, self._rate, self._limit = np.zeros([3, 0])
        self._new: list[tuple[Transfer, tuple, tuple, float, float]] = []
        self._last, self._turn = 0.0, 0

    def is_inside(self, source: int, target: int) -> bool:
        """Returns whether two workers are on one node."""
        return source // self._locals == target // self._locals

    async def send(self, source: int, target: int, size: float, limit: float) -> bool:
        """Returns True once a message has arrived, or False at the time `limit`."""
        if size <= SMALL or math.isinf(self.network.bandwidth):
            if size > SMALL and not self.is_inside(source, target):
                self.sent[source // self._locals] += size
            delay = self.network.delay(self.is_inside(source, target), size)
            return await later(delay, True)
        return await self._begin([(source, target)], size, limit)

    async def circulate(self, group: Sequence[int], size: float, limit: float) -> bool:
        """Returns True once a group has summed vectors of this size; False at `limit`.

        Each worker sends 2 (W - 1) / W of a vector to the next one, as in a ring. The
        latency is that of tree algorithms with the same bytes, 2 log2 W rounds.
        """
        pairs = list(zip(group, [*group[1:], group[0]]))
        rounds = 2 * math.ceil(math.log2(len(group)))
        each = 2 * (len(group) - 1) / len(group) * size
        if each <= SMALL or math.isinf(self.network.bandwidth):
            delay = max(self.network.delay(self.is_inside(*pair)) for pair in pairs)
            return await later(max(rounds, 1) * delay, True)
        return await self._begin(pairs, each, limit, rounds)

    def _begin(
        self, pairs: list[tuple[int, int]], size: float, limit: float, rounds: int = 1
    ) -> asyncio.Future:
        transfer = Transfer(len(pairs))
        flows = []
        for source, target in pairs:
            inside = self.is_inside(source, target)
            if not inside:
                self.sent[source // self._locals] += size
            ends = self._links_between(source, target, inside)
            flows.append((transfer, ends, (source, target), size, limit))
        delay = max(self.network.delay(self.is_inside(*pair)) for pair in pairs)
        self._after(rounds * delay, lambda: self._add(flows))
        return transfer.arrived

    def _links_between(self, source: int, target: int, inside: bool) -> tuple[int, int]:
        if inside:
            first = 2 * self._nodes
            return first + source, first + self._workers + target
        return source // self._locals, self._nodes + target // self._locals

    # Flows

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, call)

    def _add(self, flows: list) -> None:
        if not self._new:
            self.changed()
        self._new += flows

    def changed(self) -> None:
        """Recomputes the rates, once for all flows that begin at this time."""
        self._turn += 1
        turn = self._turn
        self._after(0.0, lambda: self._advance(turn))

    def _advance(self, turn: int) -> None:
        """Advances the flows to this time, and waits until the next one ends."""
        if turn != self._turn:
            return
        now = asyncio.get_running_loop().time()
        self._remaining -= self._rate * (now - self._last)
        self._last = now
        arrived = self._remaining <= self._rate * SOON
        late = ~arrived & (self._limit <= now + SOON)
        if arrived.any() or late.any():
            self._remove(arrived, late)
        self._append()
        if not self._transfers:
            return
        self._share()
        with np.errstate(divide="ignore"):
            ends = np.minimum(self._remaining / self._rate, self._limit - now)
        self._turn += 1
        turn = self._turn
        self._after(max(float(ends.min()), 0.0), lambda: self._advance(turn))

    def _remove(self, arrived: np.ndarray, late: np.ndarray) -> None:
        for k in np.flatnonzero(arrived | late):
            transfer = self._transfers[k]
            transfer.left -= 1
            if not transfer.arrived.done() and (late[k] or not transfer.left):
                transfer.arrived.set_result(not late[k])
        kept = ~(arrived | late)
        self._transfers = [self._transfers[k] for k in np.flatnonzero(kept)]
        self._ends, self._between = self._ends[kept], self._between[kept]
        self._remaining, self._rate = self._remaining[kept], self._rate[kept]
        self._limit = self._limit[kept]

    def _append(self) -> None:
        if not self._new:
            return
        transfers, ends, between, sizes, limits = zip(*self._new)
        self._new = []
        self._transfers += transfers
        self._ends = np.concatenate([self._ends, ends])
        self._between = np.concatenate([self._between, between])
        self._remaining = np.concatenate([self._remaining, sizes])
        self._limit = np.concatenate([self._limit, limits])

    def _share(self) -> None:
        """Sets the rates by the number of flows on each link."""
        count = np.bincount(self._ends.ravel(), minlength=len(self._capacity))
        share = self._capacity / np.maximum(count, 1)
        self._rate = share[self._ends].min(axis=1)
        if self.stuck:
            self._rate[np.isin(self._between, list(self.stuck)).any(axis=1)] = 0
