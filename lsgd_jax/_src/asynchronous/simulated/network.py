"""A simulated network: the time of messages that share its links."""

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np


SMALL = 4096  # bytes; messages up to this size take no bandwidth
SOON = 1e-9  # seconds; a transfer that ends within them ends now
ROUNDINGS = 4  # of the clock; so does one that ends within them


@dataclasses.dataclass(frozen=True)
class Network:
    """The links between nodes, and between the workers of a node; all full duplex.

    On a link whose bandwidth is inf only latencies take time.

    Args:
      bandwidth: bytes per second of a node's link, in each direction.
      latency: seconds from node to node.
      inside_bandwidth: bytes per second of each worker's link to the others of its node.
      inside_latency: seconds from worker to worker inside a node.
      overhead: seconds of software around a message of more than 4 KiB, at its sender.
      coordinator: seconds in which the coordinator serves a call, one after the other.
      between: bytes per second from each node to each other one, [nodes, nodes], in place
        of `bandwidth`, which is then only that of sums on idle links. The diagonal may be
        anything.

    Raises:
      ValueError: a bandwidth that is not positive, a time that is negative, bandwidths
        between nodes that are no square.

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
    between: Sequence[Sequence[float]] = ()

    def __post_init__(self):
        for name in ("bandwidth", "inside_bandwidth"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"`{name}` must be positive, got {name}={value}")
        object.__setattr__(self, "between", _square(self.between))
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

    @classmethod
    def fitted(cls, workers: int, size: float, seconds: float, latency: float) -> "Network":
        """Returns the network on which a sum of vectors of this size takes so long.

        Args:
          workers: number of workers that sum.
          size: bytes of a vector.
          seconds: of the sum.
          latency: seconds of a sum of single numbers, less than `seconds`.

        >>> round(Network.fitted(4, 1e6, 1.54, 0.04).all_reduce(4, 1e6), 6)
        1.54
        """
        rounds, each = cls.ring(workers, size)
        return cls(each / (seconds - latency), latency / rounds)

    @staticmethod
    def ring(workers: int, size: float) -> tuple[int, float]:
        """Returns the rounds of latency and the bytes per worker of a sum of vectors.

        Each worker sends 2 (W - 1) / W of a vector to the next one, as in a ring. The
        latency is that of tree algorithms with the same bytes, 2 log2 W rounds.
        """
        return 2 * math.ceil(math.log2(workers)), 2 * (workers - 1) / workers * size

    def scaled(self, factor: float) -> "Network":
        """Returns the network with all bandwidths times a factor.

        So few parameters can stand for many, on links that are slower by as much.
        """

        def times(rate):
            return rate * factor

        return dataclasses.replace(
            self,
            bandwidth=times(self.bandwidth),
            inside_bandwidth=times(self.inside_bandwidth),
            between=[[times(rate) for rate in row] for row in self.between],
        )

    def delay(self, is_inside: bool, size: float = 0.0) -> float:
        """Returns the seconds of a message on idle links."""
        if is_inside:
            latency = self.inside_latency
            bandwidth = self.inside_bandwidth
        else:
            latency = self.latency
            bandwidth = self.bandwidth
        return self.software(size) + latency + size / bandwidth

    def all_reduce(self, workers: int, size: float, is_inside: bool = False) -> float:
        """Returns the seconds in which workers sum vectors of this size on idle links.

        >>> network = Network(bandwidth=1e6, latency=0.01)
        >>> network.all_reduce(4, 1e6)
        1.54
        """
        rounds, each = self.ring(workers, size)
        bandwidth = self.inside_bandwidth if is_inside else self.bandwidth
        waits = rounds * (self.delay(is_inside) + self.software(each))
        return waits + (each / bandwidth if each > SMALL else 0.0)

    def software(self, size: float) -> float:
        """Returns the seconds of software around a message of this size."""
        return self.overhead if size > SMALL else 0.0


def _square(between: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Returns the bandwidths between nodes, of lists or an array, as tuples of floats."""
    rows = tuple(tuple(np.ravel(row).astype(float).tolist()) for row in between)
    for here, row in enumerate(rows):
        others = [rate for there, rate in enumerate(row) if there != here]
        if len(row) != len(rows) or not all(rate > 0 for rate in others):
            raise ValueError(
                "`between` must be a square of bandwidths that are positive off its "
                f"diagonal, got between={between}"
            )
    return rows


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


FLOW = np.dtype(
    [
        ("links", int, 2),
        ("workers", int, 2),
        ("left", float),  # bytes
        ("rate", float),  # bytes per second
        ("limit", float),  # the time at which it is given up
        ("arrived", object),  # a future of whether it has arrived
    ]
)


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
        self.network = network
        self._locals = locals
        workers = nodes * locals
        if network.between and len(network.between) != nodes:
            raise ValueError(
                f"`network` has {len(network.between)} nodes, so that `nodes` must be as "
                f"many, got nodes={nodes}"
            )
        # Nodes, workers inside them, pairs of nodes, and one for the end without a limit.
        links = [network.bandwidth] * 2 * nodes, [network.inside_bandwidth] * 2 * workers
        pairs = np.ravel(network.between)
        self._capacity = np.concatenate([*links, pairs, [math.inf]])
        self._nodes = nodes
        self._workers = workers
        self.sent = np.zeros(nodes)
        self.stuck = set[int]()
        self._flows = np.zeros(0, FLOW)
        self._new = list[tuple]()
        self._last = 0.0
        self._version = 0  # of the rates

    def is_inside(self, source: int, target: int) -> bool:
        """Returns whether two workers are on one node."""
        return source // self._locals == target // self._locals

    async def send(self, source: int, target: int, size: float, limit: float) -> bool:
        """Returns True once a message has arrived, or False at the time `limit`."""
        pairs = [(source, target)]
        self._count(pairs, size)
        rate = self._rate(source, target)
        latency = self._latency(pairs, size)
        if size <= SMALL or math.isinf(rate):
            return await asyncio.sleep(latency + size / rate, True)
        (arrived,) = self._begin(pairs, size, limit, latency)
        return await arrived

    async def circulate(self, group: Sequence[int], size: float, limit: float) -> bool:
        """Returns True once a group has summed vectors of this size; False at `limit`."""
        pairs = list(zip(group, [*group[1:], group[0]]))
        rounds, each = Network.ring(len(group), size)
        self._count(pairs, each)
        latency = rounds * self._latency(pairs, each)
        flowing = [pair for pair in pairs if not math.isinf(self._rate(*pair))]
        if each <= SMALL or not flowing:
            return await asyncio.sleep(latency, True)
        return all(await asyncio.gather(*self._begin(flowing, each, limit, latency)))

    def _begin(
        self, pairs: list[tuple[int, int]], size: float, limit: float, latency: float
    ) -> list[asyncio.Future]:
        """Starts a flow for each (source, target), after a latency."""
        loop = asyncio.get_running_loop()
        flows = list[tuple]()
        for pair in pairs:
            flows.append((self._links(*pair), pair, size, 0.0, limit, loop.create_future()))
        loop.call_later(latency, self._add, flows)
        return [arrived for *_, arrived in flows]

    def _count(self, pairs: list[tuple[int, int]], size: float) -> None:
        """Counts a message for each (source, target) that leaves its node."""
        for source, target in pairs:
            if not self.is_inside(source, target):
                self.sent[source // self._locals] += size

    def _rate(self, source: int, target: int) -> float:
        """Returns the bytes per second between two workers on idle links."""
        return float(self._capacity[[*self._links(source, target)]].min())

    def _links(self, source: int, target: int) -> tuple[int, int]:
        """Returns the two links that a message takes, as indices of `_capacity`."""
        here = source // self._locals
        there = target // self._locals
        if here == there:
            first = 2 * self._nodes
            return first + source, first + self._workers + target
        if self.network.between:
            last = len(self._capacity) - 1
            return last - self._nodes**2 + here * self._nodes + there, last
        return here, self._nodes + there

    def _latency(self, pairs: list[tuple[int, int]], size: float) -> float:
        """Returns the longest seconds of messages besides those on the links."""
        latencies = [self.network.delay(self.is_inside(*pair)) for pair in pairs]
        return self.network.software(size) + max(latencies)

    # Flows

    def _add(self, flows: list[tuple]) -> None:
        if not self._new:
            self.changed()
        self._new += flows

    def changed(self, seconds: float = 0.0) -> None:
        """Recomputes the rates in some seconds, once for all flows that begin now."""
        self._version += 1
        asyncio.get_running_loop().call_later(seconds, self._advance, self._version)

    def _advance(self, version: int) -> None:
        """Advances the flows to this time, and waits until the next one ends."""
        if version != self._version:
            return
        now = asyncio.get_running_loop().time()
        soon = max(SOON, ROUNDINGS * math.ulp(now))  # otherwise `now + soon` may be `now`
        flows = self._flows
        flows["left"] -= flows["rate"] * (now - self._last)
        self._last = now
        arrived = flows["left"] <= flows["rate"] * soon
        ended = arrived | (flows["limit"] <= now + soon)
        for future, has_arrived in zip(flows["arrived"][ended], arrived[ended]):
            if not future.done():  # its worker may have failed
                future.set_result(bool(has_arrived))
        flows = np.concatenate([flows[~ended], np.array(self._new, FLOW)])
        self._flows = flows
        self._new = []
        if not len(flows):
            return
        self._share()
        with np.errstate(divide="ignore"):
            ends = np.minimum(flows["left"] / flows["rate"], flows["limit"] - now)
        self.changed(max(float(ends.min()), 0.0))

    def _share(self) -> None:
        """Sets the rates by the number of flows on each link."""
        links = self._flows["links"]
        count = np.bincount(links.ravel(), minlength=len(self._capacity))
        share = self._capacity / np.maximum(count, 1)
        self._flows["rate"] = share[links].min(axis=1)
        if self.stuck:
            is_stuck = np.isin(self._flows["workers"], list(self.stuck)).any(axis=1)
            self._flows["rate"][is_stuck] = 0
