"""Values that are identical across a group of workers and stored once per group."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar


T = TypeVar("T")
Axes = str | tuple[str, ...]

WORKER_AXES = ("node", "local")

# How 'node' and 'local' are called on a mesh that the user has made.
_NAMES: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("names")


@contextlib.contextmanager
def naming(axes: Mapping[str, str]) -> Iterator[None]:
    """Gives 'node' and 'local' other names for what is traced in the `with` block."""
    token = _NAMES.set(axes)
    try:
        yield
    finally:
        _NAMES.reset(token)


def named(axis: str) -> str:
    """The name of an axis on the mesh where we are traced."""
    return _NAMES.get({}).get(axis, axis)


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
