"""Whether parameters are where an exchange has left them, seen by a few of their elements.

An exchange sets where a worker will stand. What changes its updates afterwards (an
optimizer or a clipping behind it in the chain) trains something else, while all else looks
healthy. A sample of the parameters shows it at the next step at next to no cost, whatever
changed them. No sample is taken where parameters may be sharded in a layout that is not
known: to read one element would communicate.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.layouts import element, layout_is_known
from lsgd_jax._src.trees import Tree


ELEMENTS = 8  # at most
ROUNDINGS = 4  # x + u may be compiled in other ways here and there


def unknown(x: Tree) -> Array:
    """A sample that every x matches: float32 [k]."""
    return jnp.full([len(_sampled(x))], jnp.inf, jnp.float32)


def sample_after(x: Tree, u: Tree) -> Array:
    """The middle elements of some leaves of x + u, in the dtypes of x: float32 [k]."""
    if not layout_is_known():
        return unknown(x)
    moved = [
        (trees.finite_part(x) + u).astype(x.dtype).astype(jnp.float32)
        for x, u in zip(_picked(x), _picked(u))
    ]
    return _stack(moved)


def misplaced(expected: Array, x: Tree) -> Array:
    """Whether x is somewhere else: int32 scalar, 1 or 0. What is not finite matches all."""
    if not layout_is_known():
        return jnp.int32(0)
    found = _stack([leaf.astype(jnp.float32) for leaf in _picked(x)])
    eps = [jnp.finfo(leaf.dtype).eps for leaf in _picked(x)]
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
