"""Checks on a few elements whether parameters are where an exchange has left them.

An exchange sets where a worker will stand. If something changes its updates afterwards (an
optimizer or a clipping behind it in the chain), the worker trains another model while
everything else looks healthy. A sample of the parameters shows this at the next step at
next to no cost. No sample is taken where parameters may be sharded in an unknown layout,
because reading one element would then communicate.
"""

from typing import Any

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
    return jnp.full([len(_sampled(x))], jnp.inf, jnp.float32)


def sample_after(x: Tree, u: Tree) -> Array:
    """Returns the middle elements of some leaves of x + u, rounded like x: float32 [k]."""
    if not layout_is_known():
        return unknown(x)
    moved = [
        trees.plus(trees.finite_part(x), u).astype(jnp.float32)
        for x, u in zip(_picked(x), _picked(u))
    ]
    return _stack(moved)


def misplaced(expected: Array, x: Tree) -> Array:
    """Whether x is elsewhere: int32 scalar, 1 or 0. Elements that are not finite match."""
    if not layout_is_known():
        return jnp.int32(0)
    elements = _picked(x)
    found = _stack([element.astype(jnp.float32) for element in elements])
    eps = [jnp.finfo(element.dtype).eps for element in elements]
    slack = ROUNDINGS * jnp.array(eps, jnp.float32) * jnp.maximum(abs(found), abs(expected))
    return (jnp.abs(found - expected) > slack).any().astype(jnp.int32)


def _picked(tree: Tree) -> list[Array]:
    middle = lambda leaf: tuple(n // 2 for n in leaf.shape)
    return [element(leaf, middle(leaf), path) for path, leaf in _sampled(tree)]


def _sampled(tree: Tree) -> list[tuple[Any, Array]]:
    leaves = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    stride = max(1, -(-len(leaves) // ELEMENTS))
    return leaves[::stride]


def _stack(elements: list[Array]) -> Array:
    return jnp.stack(elements) if elements else jnp.zeros([0], jnp.float32)
