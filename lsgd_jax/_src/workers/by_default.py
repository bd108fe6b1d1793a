"""Where messages of delayed pulls travel if the user does not say it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lsgd_jax._src.exchange.beside import check_may_travel
from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.wire.collectives import unsplit
from lsgd_jax._src.wire.group import Group
from lsgd_jax._src.workers.spmd import Grid
from lsgd_jax._src.workers.twin import name_of, partners, processes_of


def travels_beside(methods: Sequence[Exchange], grid: Grid) -> bool:
    """Whether the messages of some methods travel beside the steps by default.

    See `Workers.travels_beside`.

    Args:
      methods: those around a step, the innermost first.
      grid: the workers.
    """
    if jax.process_count() == 1 or not _are_far(methods, grid):
        return False
    try:
        check_may_travel(methods)
        partners(grid.mesh.devices)
    except ValueError:
        return False
    return True


def _are_far(methods: Sequence[Exchange], grid: Grid) -> bool:
    """Whether delayed messages take a link that a step does not hide."""
    delayed = [pull for method in methods for pull in method.pulls if pull.delay]
    devices = grid.mesh.devices
    if devices.flat[0].platform == "cpu":
        # XLA starts no step on several CPU devices of a process while a message of others
        # waits there.
        is_free = devices.size == len(processes_of(devices))
        return is_free and any(
            _connects(pull.rule.axes, grid, _process_of) for pull in delayed
        )
    # XLA hides a message behind the gradient of one step.
    return all(
        pull.delay > 1 and _connects(pull.rule.axes, grid, _host_of) for pull in delayed
    )


def _process_of(device: jax.Device) -> int:
    return device.process_index


def _host_of(device: jax.Device) -> int:
    """The slice of a TPU, or the machine (or NVLink domain) of a GPU."""
    return getattr(device, "slice_index", None) or 0


def _connects(axes: Any, grid: Grid, place: Callable[[jax.Device], int]) -> bool:
    """Whether a group along some axes of workers has devices at several places."""
    own = Group(axes).axes
    names = [unsplit(name_of(name, grid)) for name in grid.mesh.axis_names]
    along = tuple(i for i, name in enumerate(names) if name in own)
    places = np.vectorize(place, otypes=[int])(grid.mesh.devices)
    return bool((places.min(axis=along) != places.max(axis=along)).any())
