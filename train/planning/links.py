"""The network of a group of workers, and the seconds of their exchanges."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import lsgd_jax as lj


SCALE = 4 / lj.Wire().block
# Bytes per parameter, with their scales.
WIRES = {
    "float32": 4.0,
    "int8": 1.0 + SCALE,
    "int4": 0.5 + SCALE,
    "sparse": 0.027,  # lj.TopK() with its defaults, see docs/wire_formats.md
}


class Link(NamedTuple):
    """The network of a group of workers.

    Attributes:
      network: its bandwidth and its latency between two workers.
      workers: number of workers in the group.
      measured: seconds of pulls of a few numbers and of all parameters, including
        encoding and decoding, by kind ('leader' or 'mean') and wire format. Times that
        were not measured are computed.
    """

    network: lj.asynchronous.Network
    workers: int
    measured: Mapping[tuple[str, str], tuple[float, float]] = {}

    @classmethod
    def of(cls, mbit: float, latency_ms: float, workers: int) -> "Link":
        """The link of workers whose network has this bandwidth and latency."""
        return cls(lj.asynchronous.Network(mbit * 1e6 / 8, latency_ms / 1e3), workers)

    def seconds(
        self, kind: str, parameters: float, wire: str = "float32", fragments: int = 1
    ) -> float:
        """Seconds of a pull towards a leader, including the election, or towards a mean.

        Both are sums over all workers. A mean in few bits is sent in shares, to their
        owners and back, which has the rounds and the bytes of a sum. Sparse messages are
        gathered. A fragment has as many messages as all parameters.
        """
        if (kind, wire) in self.measured:
            few, whole = self.measured[kind, wire]
            return few + max(0.0, whole - few) / fragments
        parameters /= fragments
        if wire == "sparse":
            return self._gathered(parameters, wire)
        total = self._summed(parameters * WIRES[wire])
        return total + self._summed(4) if kind == "leader" else total

    def sent(self, parameters: float, wire: str = "float32") -> float:
        """Bytes that a worker sends in an exchange."""
        size = parameters * WIRES[wire]
        if wire == "sparse":
            return (self.workers - 1) * size
        return self.network.ring(self.workers, size)[1]

    def _summed(self, size: float) -> float:
        return self.network.all_reduce(self.workers, size)

    def _gathered(self, parameters: float, wire: str) -> float:
        rounds = math.ceil(math.log2(self.workers))
        sending = self.sent(parameters, wire) / self.network.bandwidth
        return rounds * self.network.latency + sending
