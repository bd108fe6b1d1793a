"""Branches that workers take together."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from lsgd_jax._src.shared import typed_alike


def cond(due: Any, then: Callable, otherwise: Callable, *operands: Any) -> Any:
    """`lax.cond`, or one of the branches if `due` is a Python bool.

    An array must come from a shared count, so that all workers take the same branch and
    meet in its collectives.
    """
    if due is True:
        return then(*operands)
    if due is False:
        return otherwise(*operands)

    # Types say over which axes arrays vary only while `check_vma` is on.
    types = map(jax.typeof, jax.tree.leaves(operands))
    if not any(type_.manual_axis_type.varying for type_ in types):
        return lax.cond(due, then, otherwise, *operands)

    def typed(branch, other):
        # The other branch is traced for the types of its results. XLA drops its operations.
        return lambda *operands: jax.tree.map(
            typed_alike, branch(*operands), other(*operands)
        )

    return lax.cond(due, typed(then, otherwise), typed(otherwise, then), *operands)


@custom_vmap
def unbatched(count: Array) -> Array:
    """Returns a step count; under `jax.vmap`, the count of the first row for all rows.

    All workers have the same count, so one row represents all. With a batched count as
    predicate, a `cond` would become a `select`, which communicates on every step. To read
    one row of a count that is sharded over the workers is a message of 4 bytes, so only
    branches use the result: a program without branches drops the message.
    """
    return count


@unbatched.def_vmap
def _(size: int, batched: list[bool], count: Array) -> tuple[Array, bool]:
    del size
    return (count[0] if batched[0] else count), False


def any_of(*conditions: Any) -> Any:
    """The logical or; a Python bool where the Python values among them decide."""
    if any(condition is True for condition in conditions):
        return True
    open_ = [condition for condition in conditions if condition is not False]
    return functools.reduce(jnp.logical_or, open_) if open_ else False
