"""Twin: the CPU devices beside those that train, on which exchanges travel."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lsgd_jax._src.shared import shared_flags
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.workers.device_grid import DEVICE
from lsgd_jax._src.workers.meetings import Meetings
from lsgd_jax._src.workers.spmd import Grid, compiled
from lsgd_jax._src.workers.transfer import place


Partners = Mapping[jax.Device, jax.Device]


class Twin:
    """A grid of CPU devices like that of the workers, each in the process of its partner.

    A shard of a device goes to its partner alone. So no process communicates, and leaves
    stay sharded as they are.

    Args:
      grid: the workers of the programs that train: all of them, or those of this process.
      meetings: of the workers.
      own: the workers that it has, see `among`. Defaults to those of `grid`.
      turn: see `partners`.
    """

    def __init__(
        self,
        grid: Grid,
        meetings: Meetings,
        own: Grid | None = None,
        turn: int = 0,
    ):
        self._home = grid
        self._meetings = meetings
        own = own or grid
        self.partners = partners(own.mesh.devices, turn)
        devices = np.vectorize(self.partners.get, otypes=[object])(own.mesh.devices)
        mesh = Mesh(devices, own.mesh.axis_names, axis_types=own.mesh.axis_types)
        self._grid = own._replace(mesh=mesh)

    @property
    def mesh(self) -> Mesh:
        """Its devices."""
        return self._grid.mesh

    @property
    def num_workers(self) -> int:
        """The number of its workers."""
        return self._grid.nodes * self._grid.locals

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one worker, as one over all workers, on the twin."""
        return compiled(fn, self._grid, self._meetings)

    def there(self, tree: Tree) -> Tree:
        """The tree on the twin."""
        return _moved(tree, self._home, self._grid, self.partners)

    def share(self, number: Any) -> jax.Array:
        """A number on all devices of the twin."""
        return place(number, self._grid.sharding(shared=True))

    def rows(self, is_set: Callable[[int], bool]) -> jax.Array:
        """bool [W], whether the process of each worker is chosen by its number."""
        here = is_set(jax.process_index())
        sharding = self._grid.sharding()
        shape = (self.num_workers,)

        def of(index: Any) -> np.ndarray:
            return np.full(shape, here)[index]

        return jax.make_array_from_callback(shape, sharding, of)

    def back(self, tree: Tree) -> Tree:
        """The tree on the devices that train."""
        home = {beside: device for device, beside in self.partners.items()}
        return _moved(tree, self._grid, self._home, home)

    def like_back(self, tree: Tree) -> Tree:
        """The shapes of the tree on the devices that train."""
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaves, shared_flags(tree), strict=True)
        return treedef.unflatten(
            _like(x, flag, self._grid, self._home) for x, flag in pairs
        )

    def from_other(self, other: "Twin", tree: Tree) -> Tree:
        """The tree of another twin: each worker of this one has its row there."""
        ours = self.partners
        to = {
            beside: ours[device]
            for device, beside in other.partners.items()
            if device in ours
        }
        return _moved(tree, other._grid, self._grid, to)


def among(grid: Grid, live: Collection[int]) -> Grid:
    """The grid of the workers in some processes.

    Raises:
      ValueError: they are no nodes x locals.
    """
    devices = grid.mesh.devices
    lives = np.vectorize(lambda device: device.process_index in live)(devices)
    for axis, name in enumerate(grid.mesh.axis_names):
        others = tuple(set(range(devices.ndim)) - {axis})
        whole = lives.all(axis=others)
        if name not in grid.axes or not (whole == lives.any(axis=others)).all():
            continue
        kept = np.compress(whole, devices, axis=axis)
        mesh = Mesh(kept, grid.mesh.axis_names, axis_types=grid.mesh.axis_types)
        share = whole.sum() / whole.size
        if name_of(name, grid) in ("node", DEVICE.format("node")):
            return grid._replace(mesh=mesh, nodes=round(grid.nodes * share))
        return grid._replace(mesh=mesh, locals=round(grid.locals * share))
    raise ValueError(
        "the workers that live must be whole nodes, or workers of one node, got those of "
        f"processes {sorted(live)}"
    )


def name_of(axis: str, grid: Grid) -> str:
    """'node' or 'local' for an axis of the mesh along which workers stand."""
    ours = {theirs: name for name, theirs in grid.names.items()}
    return ours.get(axis, axis)


def partners(devices: np.ndarray, turn: int = 0) -> dict[jax.Device, jax.Device]:
    """Returns the CPU device beside each device, in its process.

    A single process without further CPU devices exchanges on those that train.

    Args:
      devices: those that train.
      turn: a number below `turns`. Each has partners that no other one has: gloo knows
        connections by their devices, and keeps those to a lost process. The next turn has
        none in common with this one: a message to a process that is off the network may
        hold its device for long.

    Raises:
      ValueError: too few CPU devices in a process.
    """
    rows = {process: _rows_beside(process, devices) for process in processes_of(devices)}
    count = min(map(len, rows.values()))
    found: dict[jax.Device, jax.Device] = {}
    digit = 0
    higher = turn // count
    for process, own_rows in rows.items():
        own = [device for device in devices.flat if device.process_index == process]
        found |= zip(own, own_rows[(turn + digit) % count])
        higher, digit = divmod(higher, count)
    return found


def turns(devices: np.ndarray) -> float:
    """The number of different `partners` of devices."""
    rows = [len(_rows_beside(process, devices)) for process in processes_of(devices)]
    # A single process connects to no other.
    return min(rows) ** len(rows) if len(rows) > 1 else math.inf


def _rows_beside(process: int, devices: np.ndarray) -> list[list[jax.Device]]:
    """The CPU devices of a process beside its own, in rows of as many."""
    used = set(devices.flat)
    own = [device for device in devices.flat if device.process_index == process]
    spare = [device for device in _cpus_of(process) if device not in used]
    is_alone = jax.process_count() == 1 and own[0].platform == "cpu"
    if len(spare) < len(own) and is_alone:
        return [own]
    if len(spare) < len(own):
        needed = len(own) * (2 if own[0].platform == "cpu" else 1)
        raise ValueError(
            "exchanges beside the training need a CPU device for each of the "
            f"{len(own)} devices of a process, got {len(spare)}: call "
            f'`jax.config.update("jax_num_cpu_devices", {needed})` before jax starts, and '
            "let JAX_PLATFORMS name cpu, too, if it is set"
        )
    count = len(spare) // len(own)
    return [spare[i * len(own) : (i + 1) * len(own)] for i in range(count)]


def _cpus_of(process: int) -> list[jax.Device]:
    try:
        devices = jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS names others alone
        return []
    return [device for device in devices if device.process_index == process]


def processes_of(devices: np.ndarray) -> list[int]:
    """The numbers of the processes of devices, in order."""
    return sorted({device.process_index for device in devices.flat})


def _moved(tree: Tree, source: Grid, target: Grid, to: Partners) -> Tree:
    """The tree with each shard on another device of its process, sharded as it is."""
    leaves, treedef = jax.tree.flatten(tree)
    flags = shared_flags(tree)
    away: list[Any] = [x for x in leaves if _is_on(x, source, target)]
    shards = [shard for x in away for shard in x.addressable_shards if shard.device in to]
    devices = [to[shard.device] for shard in shards]
    data = iter(jax.device_put([shard.data for shard in shards], devices))

    def moved(x: Any, flag: bool) -> Any:
        if not _is_on(x, source, target):
            return x
        like = _like(x, flag, source, target)
        own = [next(data) for shard in x.addressable_shards if shard.device in to]
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, own)

    return treedef.unflatten(map(moved, leaves, flags))


def _like(x: Any, is_shared: bool, source: Grid, target: Grid) -> jax.ShapeDtypeStruct:
    """The shape of an array of a grid on another one."""
    own = source.spec_of(x.sharding, is_shared)
    sharding = target.sharding(own, is_shared)
    rows = () if is_shared else (target.nodes * target.locals,)
    shape = rows + x.shape[len(rows) :]
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)


def _is_on(x: Any, source: Grid, target: Grid) -> bool:
    """Whether an array lies on the devices of a grid, and not on those of another one."""
    if not isinstance(x, jax.Array) or source.mesh == target.mesh:
        return False
    is_there = getattr(x.sharding, "mesh", None) == target.mesh
    return not is_there and x.sharding.device_set == {*source.mesh.devices.flat}
