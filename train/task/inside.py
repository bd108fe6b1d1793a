"""Sharding of a worker's parameters and batches over its own devices."""

import math
from typing import Any

import jax
from jax import Array
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
    return lj.largest_dimension(axis, math.prod(axes.values()), SMALLEST)


def split_batch(tree: Any) -> Any:
    """Splits the examples of one worker's batch (leaves [B, ...]) over its devices."""
    names, mesh = lj.inside_axes(), jax.sharding.get_abstract_mesh()
    if not names:
        return tree
    count = math.prod(mesh.shape[name] for name in names)

    def split(x: Array) -> Array:
        fits = x.ndim and x.shape[0] % count == 0
        return jax.lax.with_sharding_constraint(x, P(names)) if fits else x

    return jax.tree.map(split, tree)
