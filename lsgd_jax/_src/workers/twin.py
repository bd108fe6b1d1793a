"""Twin: the CPU devices beside those that train, on which exchanges travel."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lsgd_jax._src.trees import Tree
from lsgd_jax._src.workers.meetings import Meetings
from lsgd_jax._src.workers.spmd import Grid, compiled
from lsgd_jax._src.workers.transfer import place


Partners = Mapping[jax.Device, jax.Device]


class Twin:
    """A grid of CPU devices like that of the workers, each in the process of its partner.

    A shard of a device goes to its partner alone. So no process communicates, and leaves
    stay sharded as they are.
    """

    def __init__(self, grid: Grid, meetings: Meetings):
        mesh = grid.mesh
        beside = partners(mesh.devices)
        devices = np.vectorize(beside.get, otypes=[object])(mesh.devices)
        self._to = beside
        self._from = {other: device for device, other in beside.items()}
        self._home = mesh
        self._mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        self._grid = grid._replace(mesh=self._mesh)
        self._meetings = meetings

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one worker, as one over all workers, on the twin."""
        return compiled(fn, self._grid, self._meetings)

    def there(self, tree: Tree) -> Tree:
        """The tree on the twin."""
        return _moved(tree, self._mesh, self._to)

    def share(self, number: Any) -> jax.Array:
        """A number on all devices of the twin."""
        return place(number, self._grid.sharding(shared=True))

    def back(self, tree: Tree) -> Tree:
        """The tree on the devices that train."""
        return _moved(tree, self._home, self._from)

    def like_back(self, tree: Tree) -> Tree:
        """The shapes of the tree on the devices that train."""

        def like(x: Any) -> Any:
            sharding = NamedSharding(self._home, x.sharding.spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(like, tree)


def partners(devices: np.ndarray) -> dict[jax.Device, jax.Device]:
    """Returns the CPU device beside each device, in its process.

    A single process without further CPU devices exchanges on those that train.

    Raises:
      ValueError: too few CPU devices in a process.
    """
    used = set(devices.flat)
    found: dict[jax.Device, jax.Device] = {}
    for process in sorted({device.process_index for device in used}):
        own = [device for device in devices.flat if device.process_index == process]
        spare = [
            device
            for device in jax.devices("cpu")
            if device.process_index == process and device not in used
        ]
        is_alone = jax.process_count() == 1 and own[0].platform == "cpu"
        if len(spare) < len(own) and is_alone:
            spare = own
        if len(spare) < len(own):
            needed = len(own) * (2 if own[0].platform == "cpu" else 1)
            raise ValueError(
                "exchanges beside the training need a CPU device for each of the "
                f"{len(own)} devices of a process, got {len(spare)}: call "
                f'`jax.config.update("jax_num_cpu_devices", {needed})` before jax starts'
            )
        found |= dict(zip(own, spare))
    return found


def _moved(tree: Tree, mesh: Mesh, to: Partners) -> Tree:
    """The tree with each shard on the partner of its device, sharded as it is."""
    leaves, treedef = jax.tree.flatten(tree)
    away: list[Any] = [x for x in leaves if _is_away(x, to)]
    shards = [shard for x in away for shard in x.addressable_shards]
    devices = [to[shard.device] for shard in shards]
    data = iter(jax.device_put([shard.data for shard in shards], devices))

    def moved(x: Any) -> Any:
        if not _is_away(x, to):
            return x
        sharding = NamedSharding(mesh, x.sharding.spec)
        own = [next(data) for _ in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, own)

    return treedef.unflatten(map(moved, leaves))


def _is_away(x: Any, to: Partners) -> bool:
    """Whether an array lies on devices that have other partners."""
    if not isinstance(x, jax.Array):
        return False
    device = next(iter(x.sharding.device_set))
    return to.get(device, device) != device
