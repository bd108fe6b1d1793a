"""Values that are identical across a group of workers and stored once per group."""

from typing import Any, Generic, NamedTuple, TypeVar


T = TypeVar("T")
Axes = str | tuple[str, ...]

WORKER_AXES = ("node", "local")


class Shared(NamedTuple, Generic[T]):
    """A tree that is equal on all workers, or on all workers of a group.

    Step counts, centers and anchors are shared. `Workers` stacks every leaf along a leading
    axis of W workers, except what stands in a `Shared` of all workers: that is replicated,
    and a predicate computed from it is the same on all workers, as collectives need it.

    Attributes:
      value: the tree itself; any shapes and dtypes.
      axes: over which mesh axes it is equal; None: over all of them. Otherwise the names
        are the keys of a dictionary without leaves, so that they are part of the tree's
        structure, and `value` is stacked like everything that differs between workers.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> add = workers.map(lambda x, offset: x + offset.value)
    >>> add(workers.put(jnp.arange(2.0)), lj.Shared(jnp.float32(10))).tolist()
    [10.0, 11.0]
    """

    value: T
    axes: dict[str, None] | None = None


def shared(tree: T, axes: Axes, everywhere: bool) -> Shared[T]:
    """Marks a tree as equal over `axes`; everywhere: whether these join all workers."""
    names = (axes,) if isinstance(axes, str) else axes
    return Shared(tree) if everywhere else Shared(tree, dict.fromkeys(names))


def is_shared(node: Any) -> bool:
    """Whether a node is a `Shared` of all workers: the `is_leaf` of tree maps."""
    return isinstance(node, Shared) and node.axes is None
