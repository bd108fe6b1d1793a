"""A worker of several devices: what of it each device holds."""

import math
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj


SMALLEST = 2**10  # leaves with fewer elements are whole on every device


def specs(axes: dict[str, int]) -> Any:
    """How parameters lie on the axes inside a worker: along their largest dimension.

    Args:
      axes: names and sizes.
    """
    names = tuple(axes)
    if not names:
        return None
    axis = names if len(names) > 1 else names[0]
    return lj.largest_dimension(axis, math.prod(axes.values()), SMALLEST)


def split_batch(tree: Any) -> Any:
    """One worker's batch with its examples (leaves [B, ...]) split over its devices."""
    names, mesh = lj.inside_axes(), jax.sharding.get_abstract_mesh()
    if not names:
        return tree
    count = math.prod(mesh.shape[name] for name in names)

    def split(x: Array) -> Array:
        fits = x.ndim and x.shape[0] % count == 0
        return jax.lax.with_sharding_constraint(x, P(names)) if fits else x

    return jax.tree.map(split, tree)
