"""Checks on a few elements whether parameters are where an exchange has left them.

An exchange sets where a worker will stand. If something changes its updates afterwards (an
optimizer or a clipping behind it in the chain), the worker trains another model while
everything else looks healthy. A sample of the parameters shows this at the next step at
next to no cost. No sample is taken where parameters may be sharded in an unknown layout,
because reading one element would then communicate.
"""

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.layouts import element, layout_is_known
from lsgd_jax._src.trees import Tree


ELEMENTS = 8  # at most
ROUNDINGS = 4  # x + u may be compiled differently in different programs


def unknown(x: Tree) -> Array:
    """Returns a sample that every x matches: float32 [k]."""
    return jnp.full([len(jax.eval_shape(_sampled, x))], jnp.inf, jnp.float32)


def sample_after(x: Tree, u: Tree) -> Array:
    """Returns the middle elements of some leaves of x + u, rounded like x: float32 [k]."""
    elements = list(zip(_sampled(x), _sampled(u))) if layout_is_known() else []
    if not elements:
        return unknown(x)

    def stand(x: Array, u: Array) -> Array:
        return trees.plus(trees.where_finite(x, x, 0), u).astype(jnp.float32)

    return jnp.stack([stand(*each) for each in elements])


def sample_of(y: Tree) -> Array:
    """Returns the same elements of y, the parameters after the step: float32 [k]."""
    elements = _sampled(y) if layout_is_known() else []
    if not elements:
        return unknown(y)
    return jnp.stack([element.astype(jnp.float32) for element in elements])


def misplaced(expected: Array, x: Tree) -> Array:
    """Whether x is elsewhere: int32 scalar, 1 or 0. Elements that are not finite match."""
    elements = _sampled(x) if layout_is_known() else []
    if not elements:
        return jnp.int32(0)
    found = jnp.stack([element.astype(jnp.float32) for element in elements])
    # The sum may be rounded differently where x + u is fused into another program.
    eps = [jnp.finfo(element.dtype).eps for element in elements]
    slack = ROUNDINGS * jnp.array(eps, jnp.float32) * jnp.maximum(abs(found), abs(expected))
    return (jnp.abs(found - expected) > slack).any().astype(jnp.int32)


def _sampled(tree: Tree) -> list[Array]:
    """The middle elements of at most `ELEMENTS` leaves, scalars."""
    leaves = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    # All over the tree: an optimizer behind the exchange may change some leaves only.
    stride = max(1, -(-len(leaves) // ELEMENTS))

    def middle(leaf: Array) -> tuple[int, ...]:
        return tuple(n // 2 for n in leaf.shape)

    return [element(leaf, middle(leaf), path) for path, leaf in leaves[::stride]]
