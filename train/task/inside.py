"""Sharding of a worker's parameters and batches over its own devices."""

import math
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj


SMALLEST = 2**10  # leaves with fewer elements are replicated


def specs(axes: dict[str, int]) -> Any:
    """Shardings of parameters over the mesh axes inside a worker, or None without axes.

    Parameters are split along their largest dimension.

    Args:
      axes: names and sizes of the mesh axes.
    """
    names = tuple(axes)
    if not names:
        return None
    axis = names if len(names) > 1 else names[0]
    return lj.layouts.largest_dimension(axis, math.prod(axes.values()), SMALLEST)


def mesh(axes: dict[str, int]) -> Mesh | None:
    """The devices of a worker that has a process of its own, or None without axes.

    Args:
      axes: names and sizes of the mesh axes.

    Raises:
      ValueError: the process has fewer devices.
    """
    if not axes:
        return None
    devices = jax.local_devices()
    count = math.prod(axes.values())
    if len(devices) < count:
        raise ValueError(
            f"the process of a worker must have {count} devices (workers.inside), got "
            f"{len(devices)}; see --ray.gpus-per-worker, JAX_NUM_CPU_DEVICES and XLA_FLAGS"
        )
    types = (AxisType.Auto,) * len(axes)
    grid = np.reshape(devices[:count], tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=types)


def split_batch(tree: Any) -> Any:
    """Splits the examples of one worker's batch (leaves [B, ...]) over its devices."""
    names = lj.layouts.inside_axes()
    mesh = jax.sharding.get_abstract_mesh()
    if not names:
        return tree
    count = math.prod(mesh.shape[name] for name in names)

    def split(x: Array) -> Array:
        fits = x.ndim and x.shape[0] % count == 0
        return jax.lax.with_sharding_constraint(x, P(names)) if fits else x

    return jax.tree.map(split, tree)
