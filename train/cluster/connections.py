"""The connections of the devices with one another, which gloo makes on CPUs.

They are made while all processes are here, and made anew after a loss. Then every device
must be free: one that still waits in a collective of before would not begin a new one, and
gloo has the others wait for it for no more than 30 s.
"""

import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj
from train.cluster import network


if TYPE_CHECKING:
    from train.cluster.session import Session


STUCK_S = 5.0  # that no sum over the devices of one process takes


class Connections:
    """Those of a process; its own devices are connected with one another, too.

    A device whose collective has failed leaves its neighbor in the same process waiting:
    the connection between the two is whole, and no other process knows of it.

    Args:
      session: of the process.

    Attributes:
      survive: whether the process goes on after a loss.
    """

    def __init__(self, session: "Session"):
        self._session = session
        self.survive = False
        self._may_cut = False  # what gloo has made; there are others, with GPUs say
        self._old: list[list[str]] = []  # inside this process, from before the last loss
        # Of groups of devices of this process. After two losses they are used again: then
        # the devices stand in the same order (see `train.cluster.nodes`).
        self._kept: list[list[str]] = []

    def make(self, workers: lj.Workers) -> None:
        """Connects the devices of all processes, while all are here.

        They would do so when they first communicate while training, and there gloo gives
        up if one comes more than 30 s after another, from compiling for example.
        """
        if not self._session.has_others:
            return
        self._may_cut = self.survive and jax.default_backend() == "cpu"
        if self._may_cut:
            self._make_inside(workers.mesh)
        meet = _meeting(workers.mesh)
        self._session.wait_for_all()
        jax.block_until_ready(meet())

    def let_go(self, all: bool = False) -> None:
        """Has what waits in this process for others of its devices fail, after a loss.

        Args:
          all: also in groups of devices of this process only; a second loss then ends the
            run.
        """
        if self._may_cut:
            self._old = self._inside()
            kept = [] if all else self._kept
            network.cut([ends for ends in self._old if ends not in kept])

    def _make_inside(self, mesh: Mesh) -> None:
        """Connects the devices of this process; frees them first if need be."""
        before = self._inside()
        devices = part(mesh.devices, self._session.process_id)
        meet = _meeting(Mesh(devices, mesh.axis_names[: devices.ndim]))
        cut = threading.Timer(STUCK_S, network.cut, [self._old])
        cut.start()
        try:
            jax.block_until_ready(meet())
        finally:
            cut.cancel()
        self._old = []
        self._kept += [ends for ends in self._inside() if ends not in before]

    def _inside(self) -> list[list[str]]:
        """The connections both of whose ends are in this process."""
        ends = network.connections(self._session.service_port())
        return [[here, there] for here, there in ends if [there, here] in ends]


def part(devices: np.ndarray, process: int) -> np.ndarray:
    """The devices of a process: a block of the grid, or a row if they are none."""
    mine = np.vectorize(lambda device: device.process_index)(devices) == process
    block = devices[np.ix_(*map(np.unique, np.nonzero(mine)))]
    return block if block.size == mine.sum() else devices[mine]


def _meeting(mesh: Mesh) -> Callable[[], jax.Array]:
    """Sums over each group of devices, for which they need all their connections."""
    axes = mesh.axis_names
    groups: list[Collection[str]] = [axes, *((axis,) for axis in axes)]

    def meet():
        # One after the other: independent ones each device may begin in an order of its
        # own, and wait in one group for a device that waits in another. And of what XLA
        # does not know before: it would leave out a sum of constants.
        total = 0
        for group in groups:
            total = lax.psum(total + lax.axis_index(group), group)
        return total

    everywhere = jax.shard_map(meet, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    return jax.jit(everywhere).lower().compile()
