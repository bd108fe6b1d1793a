"""The grid of devices: which device holds which workers, and the names of its axes."""

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from lsgd_jax._src.checks import check_positive_int
from lsgd_jax._src.shared import WORKER_AXES
from lsgd_jax._src.wire.collectives import DEVICE, SLOT


Slots = list[tuple[str, int]]

# Names that an axis inside a worker cannot have.
RESERVED = (
    *WORKER_AXES,
    *(form.format(axis) for form in (DEVICE, SLOT) for axis in WORKER_AXES),
)


def check_inside(inside: Mapping[str, int] | None) -> dict[str, int]:
    """Returns the sizes of the axes inside a worker, or raises ValueError."""
    if not isinstance(inside or {}, Mapping):
        raise ValueError(
            "`inside` must be a dict from the names of mesh axes to their sizes, such as "
            f"{{'fsdp': 4}}, got inside={inside!r}"
        )
    for name, size in (inside or {}).items():
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise ValueError(
                "a name in `inside` must be an identifier, and none of "
                f"{', '.join(map(repr, RESERVED))}, got {name!r}"
            )
        check_positive_int(f"inside[{name!r}]", size)
    return {name: int(size) for name, size in (inside or {}).items()}


def device_grid(
    nodes: int,
    locals: int,
    devices: Sequence[jax.Device] | None,
    inside: tuple[int, ...] = (),
) -> np.ndarray:
    """Returns the devices as an array [node, local, *inside].

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
    """Raises ValueError if a process has no device in the grid and cannot take part."""
    busy = {device.process_index for device in grid.flat}
    idle = [str(process) for process in range(processes) if process not in busy]
    if idle:
        raise ValueError(
            f"every process must have a worker, but of {processes} processes these have "
            f"none: {', '.join(idle)}; use more workers or fewer processes"
        )


def warn_of_idle_devices(nodes: int, locals: int, grid: np.ndarray, available: int) -> None:
    """Warns if some devices are idle while others hold more workers than necessary.

    Args:
      nodes, locals: the grid of workers.
      grid: the devices in use, [node, local, *inside].
      available: how many devices there are.
    """
    workers = nodes * locals
    each = math.prod(grid.shape[2:])
    places = grid.size // each
    most = available // each
    if workers // places <= -(-workers // most):
        return  # a step takes no longer than with all devices in use
    fewer = workers - workers % most
    fitting = [n for n in range(1, most + 1) if most % n == 0]
    among = "" if nodes in fitting else f" in {', '.join(map(str, fitting))} nodes"
    warnings.warn(
        f"{workers} workers ({nodes} nodes x {locals} locals) use {grid.size} of the "
        f"{available} devices, with {workers // places} workers on each, because each must "
        f"hold the same number: {fewer} or {fewer + most} workers{among} would use all; "
        "pass `devices=` if this is what you want",
        stacklevel=5,  # the call of `Workers`
    )


def named_mesh(
    grid: np.ndarray, nodes: int, locals: int, inside: Iterable[str] = ()
) -> tuple[Mesh, Slots]:
    """Returns the grid as a mesh on which 'node' and 'local' mean all workers.

    An axis that lies across devices keeps its name as a mesh axis. An axis that lies inside
    a device becomes a vmapped axis of that name. An axis that does both is split and gets
    two new names, which `collectives` joins again; a bare `lax.psum` over it
    then fails, where it would otherwise sum over a part of the workers.

    Returns:
      The mesh, and the names and sizes of the axes inside a device.
    """
    device_names: list[str] = []
    slots: Slots = []
    for axis, devices, workers in zip(WORKER_AXES, grid.shape, (nodes, locals)):
        unsplit = devices == workers
        on_one = devices == 1
        device_names.append(axis if unsplit else DEVICE.format(axis))
        if not unsplit:
            slots.append((axis if on_one else SLOT.format(axis), workers // devices))
    types = (AxisType.Auto,) * grid.ndim
    return Mesh(grid, (*device_names, *inside), axis_types=types), slots


def check_mesh(mesh: Any, axes: Any) -> tuple[str, ...]:
    """Returns the names of the workers' axes of a mesh that a user has made.

    Raises:
      ValueError: no mesh, or one with axes of several types; axes that are not one or two
        of its names.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must be a jax.sharding.Mesh, got mesh={mesh!r}")
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    fits = len(names) in (1, 2) and len(set(names)) == len(names)
    if not fits or not set(names) <= set(mesh.axis_names):
        known = ", ".join(map(repr, mesh.axis_names))
        raise ValueError(
            "`axes` must name one or two axes of the mesh for the workers, from "
            f"{known}, got axes={axes!r}"
        )
    if len(set(mesh.axis_types)) > 1 or AxisType.Manual in mesh.axis_types:
        types = zip(mesh.axis_names, mesh.axis_types)
        kinds = ", ".join(f"{name!r} is {kind.name}" for name, kind in types)
        raise ValueError(
            "the axes of `mesh` must all be AxisType.Explicit or all AxisType.Auto, but "
            f"{kinds}"
        )
    return names


def pick(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> list[jax.Device]:
    """Picks the devices for the grid: equally many of each host and process, if possible.

    A host is a TPU slice, or a machine (or NVLink domain) of GPUs and CPUs, which XLA
    numbers by its boot id: all processes on one machine have the same number.
    """
    used = math.prod(shape)
    hosts: dict[Any, list[jax.Device]] = {}
    for device in devices:
        host = getattr(device, "slice_index", None)
        host = device.process_index if host is None else host
        hosts.setdefault(host, []).append(device)
    share, rest = divmod(used, len(hosts))
    if rest or any(len(members) < share for members in hosts.values()):
        return list(itertools.chain(*hosts.values()))[:used]
    return [device for members in hosts.values() for device in _some(members, share)]


def _some(members: Sequence[jax.Device], count: int) -> Sequence[jax.Device]:
    """Some devices of a host: equally many of each of its processes, if possible."""
    processes: dict[int, list[jax.Device]] = {}
    for device in members:
        processes.setdefault(device.process_index, []).append(device)
    share, rest = divmod(count, len(processes))
    if rest or any(len(own) < share for own in processes.values()):
        return members[:count]
    return [device for own in processes.values() for device in own[:share]]


def _grids(nodes: int, locals: int, available: int) -> list[tuple[int, int]]:
    """Grids of devices in which every device holds consecutive workers."""

    def divisors(n):
        return [d for d in range(1, n + 1) if n % d == 0]

    grids = itertools.chain(
        ((nodes, d) for d in divisors(locals)), ((d, 1) for d in divisors(nodes))
    )
    return [(a, b) for a, b in grids if a * b <= available]
