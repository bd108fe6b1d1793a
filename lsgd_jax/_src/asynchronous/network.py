"""A network in a simulation: how long messages take that share its links."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


SMALL = 4096  # bytes; messages up to this size are not counted against the links
SOON = 1e-9  # seconds; what ends within them ends now


@dataclasses.dataclass(frozen=True)
class Network:
    """The links between nodes, and between the workers of a node; all full duplex.

    Args:
      bandwidth: bytes per second of a node's link, in each direction.
      latency: seconds from node to node.
      inside_bandwidth: of each worker's link to the others of its node.
      inside_latency: seconds from worker to worker inside a node.
      overhead: seconds of software around a message, on the side of who asks.
      coordinator: seconds in which the coordinator serves a call, one after the other.

    Raises:
      ValueError: a bandwidth that is not positive, a time that is negative.

    >>> Network.named("ethernet-1g").bandwidth
    117500000.0
    >>> Network.named("ethernet")
    Traceback (most recent call last):
    ValueError: `network` must be one of ethernet-100m, ethernet-1g, ethernet-10g,
    ethernet-25g, infiniband-100g, wan-100m, wan-1g, got network='ethernet'
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
            if not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be positive, got {name}={value}")
        for name in ("latency", "inside_latency", "overhead", "coordinator"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be at least 0, got {name}={value}")

    @classmethod
    def named(cls, name: str) -> "Network":
        """One of the `NETWORKS`."""
        if name not in NETWORKS:
            known = ", ".join(NETWORKS)
            raise ValueError(f"`network` must be one of {known}, got network={name!r}")
        return NETWORKS[name]

    def delay(self, is_inside: bool, size: float = 0.0) -> float:
        """Seconds of a message on links that are free."""
        if is_inside:
            return self.overhead + self.inside_latency + size / self.inside_bandwidth
        return self.overhead + self.latency + size / self.bandwidth


def _ethernet(gigabits: float, latency: float) -> Network:
    """Of each 1,538 bytes on the wire TCP carries 1,448."""
    return Network(bandwidth=0.94 * gigabits * 1e9 / 8, latency=latency)


NETWORKS: Mapping[str, Network] = {
    "ethernet-100m": _ethernet(0.1, 200e-6),
    "ethernet-1g": _ethernet(1, 100e-6),
    "ethernet-10g": _ethernet(10, 50e-6),
    "ethernet-25g": _ethernet(25, 30e-6),
    "infiniband-100g": Network(bandwidth=12e9, latency=2e-6),
    "wan-100m": _ethernet(0.1, 20e-3),
    "wan-1g": _ethernet(1, 20e-3),
}


class Transfer:
    """Bytes on their way over one or several pairs of links.

    Attributes:
      event: of the engine; its value is whether they have arrived.
      left: how many pairs of links still carry some of them.
    """

    def __init__(self, event: Any, left: int):
        self.event, self.left = event, left


class Links:
    """All links of a cluster, and what they carry.

    A link is shared equally by what it carries at a time, and what passes two links goes as
    fast as the slower one lets it; what it leaves of the other is not given to others.

    Args:
      environment: the engine's: `now`, `timeout(seconds)` and `event()`.
      network: what the links are.
      nodes, locals: the grid of workers.

    Attributes:
      sent: bytes that have left each node, [nodes].
      stuck: workers that nothing leaves or reaches any more.
    """

    def __init__(self, environment: Any, network: Network, nodes: int, locals: int):
        self._environment, self.network, self._locals = environment, network, locals
        workers = nodes * locals
        self._capacity = np.repeat(
            [network.bandwidth, network.inside_bandwidth], [2 * nodes, 2 * workers]
        )
        self._nodes, self._workers = nodes, workers
        self.sent, self.stuck = np.zeros(nodes), set[int]()
        self._transfers: list[Transfer] = []
        self._ends = np.zeros([0, 2], int)  # of each flow its two links
        self._between = np.zeros([0, 2], int)  # and its two workers
        self._remaining, self._rate, self._limit = np.zeros([3, 0])
        self._new: list[tuple[Transfer, tuple, tuple, float, float]] = []
        self._last, self._turn = 0.0, 0

    def is_inside(self, source: int, target: int) -> bool:
        """Whether two workers are of one node."""
        return source // self._locals == target // self._locals

    def send(self, source: int, target: int, size: float, limit: float) -> Any:
        """An event: a message has arrived (True), or not at the time `limit` (False)."""
        if size <= SMALL:
            delay = self.network.delay(self.is_inside(source, target), size)
            return self._environment.timeout(delay, value=True)
        return self._begin([(source, target)], size, limit)

    def circulate(self, group: Sequence[int], size: float, limit: float) -> Any:
        """An event: all workers of a group have the sum of vectors of this size.

        Each sends 2 (W - 1) / W of a vector to the next one, as in a ring; latencies are
        those of the 2 log2 W rounds that other algorithms with the same bytes have.
        """
        pairs = list(zip(group, [*group[1:], group[0]]))
        rounds = 2 * math.ceil(math.log2(len(group)))
        each = 2 * (len(group) - 1) / len(group) * size
        if each <= SMALL:
            delay = max(self.network.delay(self.is_inside(*pair)) for pair in pairs)
            return self._environment.timeout(max(rounds, 1) * delay, value=True)
        return self._begin(pairs, each, limit, rounds)

    def _begin(
        self, pairs: list[tuple[int, int]], size: float, limit: float, rounds: int = 1
    ) -> Any:
        transfer = Transfer(self._environment.event(), len(pairs))
        flows = []
        for source, target in pairs:
            inside = self.is_inside(source, target)
            if not inside:
                self.sent[source // self._locals] += size
            ends = self._links_between(source, target, inside)
            flows.append((transfer, ends, (source, target), size, limit))
        delay = max(self.network.delay(self.is_inside(*pair)) for pair in pairs)
        self._after(rounds * delay, lambda: self._add(flows))
        return transfer.event

    def _links_between(self, source: int, target: int, inside: bool) -> tuple[int, int]:
        if inside:
            first = 2 * self._nodes
            return first + source, first + self._workers + target
        return source // self._locals, self._nodes + target // self._locals

    # What is in flight

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        event = self._environment.timeout(seconds)
        event.callbacks.append(lambda _: call())

    def _add(self, flows: list) -> None:
        if not self._new:
            self.changed()
        self._new += flows

    def changed(self) -> None:
        """Has the rates worked out anew, once for all that begins at this time."""
        self._turn += 1
        turn = self._turn
        self._after(0.0, lambda: self._advance(turn))

    def _advance(self, turn: int) -> None:
        """Moves what is in flight on to this time, and waits for the next end."""
        if turn != self._turn:
            return
        now = self._environment.now
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
            if transfer.event.triggered:
                continue
            if late[k] or not transfer.left:
                transfer.event.succeed(not late[k])
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
        """Sets the rates by how many share each link now."""
        count = np.bincount(self._ends.ravel(), minlength=len(self._capacity))
        share = self._capacity / np.maximum(count, 1)
        self._rate = share[self._ends].min(axis=1)
        if self.stuck:
            self._rate[np.isin(self._between, list(self.stuck)).any(axis=1)] = 0
