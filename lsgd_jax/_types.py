"""The types that the whole library shares."""

import dataclasses
from typing import Any, Generic, TypeVar

import jax


T = TypeVar("T")
Tree = Any  # a pytree of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared(Generic[T]):
    """A leaf (or tree) that is equal on all workers, and kept once instead of W times.

    Step counts, centers and anchors are shared. `Workers` stacks every leaf along a
    leading axis of W workers, except what stands in a `Shared`: it is replicated, and a
    predicate worked out from it is the same on all workers, as collectives need it.

    Attributes:
      value: the tree itself; any shapes and dtypes, no leading axis of W.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> add = workers.map(lambda x, offset: x + offset.value)
    >>> add(workers.put(jnp.arange(2.0)), lj.Shared(jnp.float32(10))).tolist()
    [10.0, 11.0]
    """

    value: T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped(Generic[T]):
    """A leaf (or tree) that is equal within a group of workers, and kept by each of them.

    What stands in a `Shared` if the group is all workers stands in a `Grouped` if it is
    only a part of them: `Workers` stacks it, as everything that differs between workers.

    Attributes:
      value: the tree itself, with a leading axis of W outside of `Workers.map`.
    """

    value: T

    def resized(self) -> "Grouped[T]":
        """For `resize`: of other workers it is not known who forms a group."""
        raise ValueError(
            "the workers must stay the same if groups of them, and not all, have something "
            "in common (`Grouped`)"
        )


def is_shared(node: object) -> bool:
    """Whether a node of a tree is a `Shared`: the `is_leaf` of tree maps."""
    return isinstance(node, Shared)
