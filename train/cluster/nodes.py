"""The nodes of a run, and the processes that they belong to."""

from collections.abc import Collection
from typing import NamedTuple

import jax

import lsgd_jax as lj


class Nodes(NamedTuple):
    """Nodes of workers on the devices of several processes.

    Attributes:
      rows: devices [[...], ...]; those of a row hold the workers of as many whole nodes.
      per_row: how many nodes.
    """

    rows: tuple[tuple[jax.Device, ...], ...]
    per_row: int

    @classmethod
    def of(cls, workers: lj.Workers) -> "Nodes":
        """Those of a grid of workers."""
        rows = tuple(tuple(row.flat) for row in workers.mesh.devices)
        return cls(rows, workers.nodes // len(rows))

    def without(self, processes: Collection[int], lost: bool = True) -> "Nodes":
        """Those that none of these processes belongs to; in reverse after a loss.

        On CPUs jax keeps the connections (gloo) among devices in a certain order for good,
        also if a loss has broken them. In reverse it makes new ones. Processes that leave
        break none, and once more in reverse would be the order that is broken.
        """
        whole = lambda row: all(device.process_index not in processes for device in row)
        kept = tuple(filter(whole, self.rows))
        if lost:
            kept = tuple(row[::-1] for row in reversed(kept))
        return self._replace(rows=kept)

    @property
    def number(self) -> int:
        """How many nodes there are."""
        return self.per_row * len(self.rows)

    @property
    def devices(self) -> list[jax.Device]:
        """Their devices, in order."""
        return [device for row in self.rows for device in row]

    @property
    def processes(self) -> set[int]:
        """The processes that belong to them."""
        return {device.process_index for device in self.devices}
