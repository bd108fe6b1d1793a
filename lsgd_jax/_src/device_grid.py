"""Which device stands where in the node × local grid, and what its axes are called."""

import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from lsgd_jax._src.checks import check_all_auto
from lsgd_jax._src.collectives import DEVICE, SLOT
from lsgd_jax._src.shared import WORKER_AXES


Slots = list[tuple[str, int]]


def device_grid(
    nodes: int,
    locals: int,
    devices: Sequence[jax.Device] | None,
    inside: tuple[int, ...] = (),
) -> np.ndarray:
    """The devices as an array [node, local, *inside].

    Its first two sizes divide nodes × locals; `inside` are the sizes inside a worker.
    """
    available = list(jax.devices() if devices is None else devices)
    each = math.prod(inside)
    if len(available) < each:
        raise ValueError(
            f"a worker of {' x '.join(map(str, inside))} devices (`inside`) needs {each} "
            f"devices, got {len(available)}"
        )
    shape = max(_grids(nodes, locals, len(available) // each), key=math.prod) + inside
    if devices is not None and math.prod(shape) != len(available):
        fitting = sorted(set(map(math.prod, _grids(nodes, locals, nodes * locals))))
        raise ValueError(
            f"{nodes * locals} workers ({nodes} nodes x {locals} locals) do not divide "
            f"over the {len(available)} devices given; "
            f"{', '.join(str(n * each) for n in fitting)} devices would fit"
        )
    return np.array(pick(available, shape), dtype=object).reshape(shape)


def check_no_process_is_idle(grid: np.ndarray, processes: int) -> None:
    """Raises ValueError if a process has no device in the grid: it could not take part."""
    busy = {device.process_index for device in grid.flat}
    idle = [str(process) for process in range(processes) if process not in busy]
    if idle:
        raise ValueError(
            f"every process must have a worker, but of {processes} processes these have "
            f"none: {', '.join(idle)}; take more workers, or fewer processes"
        )


def warn_of_idle_devices(nodes: int, locals: int, grid: np.ndarray, available: int) -> None:
    """Warns if devices idle while the others hold more workers than they would have to.

    Args:
      nodes, locals: the grid of workers.
      grid: the devices in use, [node, local, *inside].
      available: how many devices there are.
    """
    workers, each = nodes * locals, math.prod(grid.shape[2:])
    places, most = grid.size // each, available // each
    if workers // places <= -(-workers // most):
        return  # a step takes no longer than with all devices in use
    fewer = workers - workers % most
    fitting = [n for n in range(1, most + 1) if most % n == 0]
    among = "" if nodes in fitting else f" in {', '.join(map(str, fitting))} nodes"
    warnings.warn(
        f"{workers} workers ({nodes} nodes x {locals} locals) use {grid.size} of the "
        f"{available} devices, with {workers // places} workers on each, because each must "
        f"hold equally many: {fewer} or {fewer + most} workers{among} would use all; pass "
        "`devices=` if this is what you want",
        stacklevel=4,  # where `Workers` is called
    )


def named_mesh(
    grid: np.ndarray, nodes: int, locals: int, inside: Iterable[str] = ()
) -> tuple[Mesh, Slots]:
    """The grid as a mesh, its axes named so that 'node' and 'local' mean all workers.

    An axis that lies on the devices as a whole keeps its name there. One that lies
    inside the devices as a whole is a vmapped axis of that name. One that is split
    gets two new names, which `collectives` puts together again; a bare `lax.psum` over
    it then fails instead of summing a part.

    Returns:
      The mesh, and the axes inside a device: their names and sizes.
    """
    device_names: list[str] = []
    slots: Slots = []
    for axis, devices, workers in zip(WORKER_AXES, grid.shape, (nodes, locals)):
        whole, on_one = devices == workers, devices == 1
        device_names.append(axis if whole else DEVICE.format(axis))
        if not whole:
            slots.append((axis if on_one else SLOT.format(axis), workers // devices))
    types = (AxisType.Auto,) * grid.ndim
    return Mesh(grid, (*device_names, *inside), axis_types=types), slots


def check_mesh(mesh: Any, axes: Any) -> tuple[str, ...]:
    """The names of the workers' axes of a mesh that a user has made.

    Raises:
      ValueError: no mesh, one with axes that are not automatic; axes that are not one or
        two of its names.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must be a jax.sharding.Mesh, got mesh={mesh!r}")
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    fits = len(names) in (1, 2) and len(set(names)) == len(names)
    if not fits or not set(names) <= set(mesh.axis_names):
        known = ", ".join(map(repr, mesh.axis_names))
        raise ValueError(
            "`axes` must name one or two axes of the mesh along which workers stand, of "
            f"{known}, got axes={axes!r}"
        )
    check_all_auto(mesh)
    return names


def leading_axis_over(mesh: Mesh, axes: Sequence[str]) -> PartitionSpec:
    """Shards the leading axis over all workers' devices, written as XLA writes it back."""
    names = tuple(name for name in axes if mesh.shape[name] > 1)
    if not names:
        return PartitionSpec()
    return PartitionSpec(names if len(names) > 1 else names[0])


def pick(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> list[jax.Device]:
    """The devices for the grid, host by host, as many from each host if it can be."""
    used = math.prod(shape)
    hosts: dict[Any, list[jax.Device]] = {}
    for device in devices:
        hosts.setdefault(_host(device), []).append(device)
    share, rest = divmod(used, len(hosts))
    if rest or any(len(members) < share for members in hosts.values()):
        return list(itertools.chain(*hosts.values()))[:used]
    return [device for members in hosts.values() for device in members[:share]]


def _grids(nodes: int, locals: int, available: int) -> list[tuple[int, int]]:
    """Device grids on which every device holds workers that follow one another."""
    divisors = lambda n: [d for d in range(1, n + 1) if n % d == 0]
    grids = itertools.chain(
        ((nodes, d) for d in divisors(locals)), ((d, 1) for d in divisors(nodes))
    )
    return [(a, b) for a, b in grids if a * b <= available]


def _host(device: jax.Device) -> int:
    """A number that devices which are close to one another have in common.

    XLA numbers TPU slices, and the machines (or NVLink domains) of GPUs and CPUs by their
    boot ids, so that processes on one machine have one number, however many there are.
    """
    close = getattr(device, "slice_index", None)
    return device.process_index if close is None else close
