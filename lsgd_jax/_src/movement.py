"""Where a worker is moved, leaf by leaf: by its own step, and by a pull.

Scalars that say what becomes of a worker are multiplied in, or are what is filled in where
something is not finite: for each scalar that a `where` asks XLA's CPU compiler makes two
loops of one, and compile time grows by a multiple.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.trees import Tree


def settle(x: Tree, u: Tree, trusted: Array, sick: Array) -> Tree:
    """u; of a step that is not trusted only what is finite; 0 for a worker that is sick.

    nan where x is not finite, so that x stays so until an exchange replaces it.
    """
    fill = jnp.where(trusted & ~sick, jnp.nan, 0.0)
    fill, moves = trees.materialized(fill, jnp.where(sick, 0.0, 1.0))

    def leaf(x: Array, u: Array) -> Array:
        step = trees.where_finite(u, u, fill.astype(u.dtype)) * moves.astype(u.dtype)
        return trees.where_finite(x, step, jnp.nan)

    return jax.tree.map(leaf, x, u)


def stay(x: Tree, u: Tree) -> Tree:
    """u; where it is not finite 0, or nan if x is not finite either."""
    keep = lambda x: trees.where_finite(x, jnp.zeros_like(x), jnp.nan)
    leaf = lambda x, u: jnp.where(jnp.isfinite(u), u, keep(x).astype(u.dtype))
    return jax.tree.map(leaf, x, u)


def move(x: Tree, u: Tree, z: Tree, weight: Any, found: Array, fit: Array) -> Tree:
    """The u that takes x to y + λ (z - y) if fit, to z itself if not or if λ is 1.

    y = x + u. Without a target, and where nothing is moved, u stays to the bit. An x that
    is not finite is replaced, see `apply_updates`.
    """
    whole = found & (~fit | (weight == 1))
    keep, pull = (
        jnp.where(whole, 0.0, 1.0),
        jnp.where(whole, 1, jnp.where(found, weight, 0)),
    )
    keep, pull, fill = trees.materialized(keep, pull, jnp.where(found, 0, jnp.nan))

    def leaf(x: Array, u: Array, z: Array) -> Array:
        y = trees.widened((x + u).astype(x.dtype))
        near = trees.where_finite(y, y, fill.astype(y.dtype)) * keep.astype(y.dtype)
        z = trees.finite_part(z.astype(y.dtype))
        # As the worker will hold it: what x + u rounds to is the same on all workers then.
        to = trees.widened((near + pull.astype(y.dtype) * (z - near)).astype(x.dtype))
        step = to - trees.finite_part(trees.widened(x))
        return jnp.where(to == y, u, step.astype(u.dtype))

    return jax.tree.map(leaf, x, u, z)
