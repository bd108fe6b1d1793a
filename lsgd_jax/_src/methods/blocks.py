"""Norms and weights of a model as a whole, or of each of its leaves."""

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.norms import norm, squares
from lsgd_jax._src.trees import Tree, widened


def leaf_norms(tree: Tree) -> Array:
    """The norm of every leaf: [L], of the default float type."""
    dtype = jnp.result_type(float)
    each = [norm(squares(x)) for x in jax.tree.leaves(tree)]
    if not each:
        return jnp.zeros([0], dtype)
    return jnp.stack(trees.materialized(*each)).astype(dtype)


def times(tree: Tree, factors: Array) -> Tree:
    """Every leaf times its factor, in float32 at least.

    Args:
      tree: L leaves.
      factors: [L], or [1] for all leaves.
    """
    leaves, treedef = jax.tree.flatten(tree)
    each = jnp.broadcast_to(factors, [len(leaves)])
    scaled = [widened(x) * f.astype(widened(x).dtype) for x, f in zip(leaves, each)]
    return treedef.unflatten(scaled)
