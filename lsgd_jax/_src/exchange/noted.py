"""Notes what a program exchanges while it is traced, for checks of the whole program."""

import contextvars
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group


class Exchanged(NamedTuple):
    """One exchange or aggregation in a program.

    Attributes:
      axes: the mesh axes along which it communicates, in some phase.
      is_silent: whether it does nothing in the phase for which the program is compiled.
      has_arrays: whether the parameters, or gradients, are more than scalars.
    """

    axes: frozenset[str]
    is_silent: bool
    has_arrays: bool


# Those of the program of one worker that `Workers.map` is tracing.
EXCHANGES: contextvars.ContextVar[list[Exchanged]] = contextvars.ContextVar("exchanges")


def note(
    axes_of_each: Iterable[str | tuple[str, ...]], tree: Tree, is_silent: bool = False
) -> None:
    """Notes that this program exchanges a tree along these axes."""
    exchanges = EXCHANGES.get(None)
    if exchanges is None:
        return
    axes = frozenset(axis for axes in axes_of_each for axis in Group(axes).axes)
    has_arrays = any(jnp.ndim(leaf) for leaf in jax.tree.leaves(tree))
    exchanges.append(Exchanged(axes, is_silent, has_arrays))
