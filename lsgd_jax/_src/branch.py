"""Branches that workers take together."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from lsgd_jax._src.trees import Tree


def cond(due: Any, then: Callable, otherwise: Callable, *operands: Any) -> Any:
    """`lax.cond`, or the one branch if `due` is True itself.

    An array must come from a shared count, so that all workers take the same branch and
    meet in its collectives.
    """
    if due is True:
        return then(*operands)
    if due is False:
        return otherwise(*operands)

    if not any(map(_varying, jax.tree.leaves(operands))):
        return lax.cond(due, then, otherwise, *operands)

    def typed(branch, other):
        return lambda *operands: _typed_alike(branch(*operands), other(*operands))

    return lax.cond(due, typed(then, otherwise), typed(otherwise, then), *operands)


def _typed_alike(tree: Tree, like: Tree) -> Tree:
    """The same values, typed as varying over the axes over which `like` varies too."""

    def cast(x, y):
        missing = tuple(_varying(y) - _varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree, like)


def _varying(x: Array) -> frozenset[str]:
    """Over which axes x is typed to vary: none unless types are checked (`check_vma`)."""
    return jax.typeof(x).manual_axis_type.varying


@custom_vmap
def the_same_for_all(count: Array) -> Array:
    """A step count; under `jax.vmap` that of the first row, not one per row.

    All workers count alike, so one row speaks for all. A predicate that is computed from a
    batched count would make a `select` of a `cond`, which communicates on every step.
    """
    return count


@the_same_for_all.def_vmap
def _(size: int, batched: list[bool], count: Array) -> tuple[Array, bool]:
    del size
    return (count[0] if batched[0] else count), False


def is_due(t: Array, every: int, at: int) -> Any:
    """Whether t ≡ at (mod every); True itself if every is 1."""
    return every == 1 or t % every == at


def any_of(*conditions: Any) -> Any:
    """Their `or`; True itself if one of them is, which is known while tracing then."""
    if any(condition is True for condition in conditions):
        return True
    return functools.reduce(jnp.logical_or, conditions, False)
