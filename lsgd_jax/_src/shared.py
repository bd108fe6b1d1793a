"""Values that are identical across a group of workers and stored once per group."""

import contextlib
import contextvars
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


T = TypeVar("T")
Tree = Any
Axes = str | tuple[str, ...]

# The scope, in a compiled program, of messages that are sent only if workers differ.
REPAIR = "lsgd_repair"

STATIC = "`map(fn, static=...)` names an argument that is a Python value"

HOST = jax.memory.Space.Host
WORKER_AXES = ("node", "local")

# The names of 'node' and 'local' on a mesh that the user has made, while it is traced.
NAMES: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("names")

# The vmapped axes of `Workers.map` while it traces a worker, which is not vmapped yet.
SLOTS: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("slots")


@contextlib.contextmanager
def during(variable: contextvars.ContextVar[T], value: T) -> Generator[None]:
    """Sets a context variable in the `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class Shared(NamedTuple, Generic[T]):
    """A tree that is equal on all workers, or on all workers of a group.

    Step counts, centers and anchors are shared. `Workers` stacks every leaf along a leading
    axis of W workers, except the leaves of a `Shared` of all workers. These are replicated,
    and a predicate computed from them is the same on all workers, as collectives need it.

    Attributes:
      value: the tree itself; any shapes and dtypes.
      axes: the mesh axes over which it is equal, or None if it is equal over all of them.
        The names are the keys of a dictionary without leaves, so that they are part of the
        tree's structure. With axes, `value` is stacked like any per-worker tree.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> add = workers.map(lambda x, offset: x + offset.value)
    >>> add(workers.put(jnp.arange(2.0)), lj.Shared(jnp.float32(10))).tolist()
    [10.0, 11.0]
    """

    value: T
    axes: dict[str, None] | None = None

    def __getitem__(self, key: Any) -> Any:
        try:
            return tuple.__getitem__(self, key)  # a field, as of any NamedTuple
        except TypeError:
            raise TypeError(
                f"a `Shared` holds its tree in `value`: write shared.value[{key!r}]"
            ) from None

    if not TYPE_CHECKING:  # type checkers would then accept every name

        def __getattr__(self, name: str) -> Any:
            advice = ""
            if hasattr(self.value, name):
                advice = f": its tree is in `value`, write shared.value.{name}"
            raise AttributeError(f"a `Shared` has no attribute {name!r}{advice}")


# Values that are equal although no collective has made them


def known_equal(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns x, which is equal along these mesh axes, for whoever checks that it is.

    `Workers.map` and the types of jax prove equality by collectives alone.
    """
    return known_equal_p.bind(x, axes=axes)


known_equal_p = Primitive("known_equal")
known_equal_p.def_impl(lambda x, axes: x)
batching.defvectorized(known_equal_p)
mlir.register_lowering(known_equal_p, lambda context, x, axes: [x])


@known_equal_p.def_abstract_eval
def _(x: Any, axes: tuple[str, ...]) -> Any:
    type_ = x.manual_axis_type
    return x.update(manual_axis_type=type_.update(varying=type_.varying - {*axes}))


# Stacked trees: shared leaves [...], and all others [W, ...]


def is_shared(node: Any) -> bool:
    """Whether a node is a `Shared` of all workers: the `is_leaf` of tree maps."""
    return isinstance(node, Shared) and node.axes is None


def shared_flags(tree: Tree) -> list[bool]:
    """Whether each leaf stands in a `Shared` of all workers."""
    nodes = jax.tree.leaves(tree, is_leaf=is_shared)
    sizes = [(is_shared(node), len(jax.tree.leaves(node))) for node in nodes]
    return [shared for shared, size in sizes for _ in range(size)]


def one_worker(tree: Tree, leading_axes: int = 1) -> list[Any]:
    """Returns the leaves of one worker's part of a tree, as shapes, dtypes and memories.

    They stay a list, because a user's node may refuse leaves that are no arrays.

    leading_axes: how many axes are dropped from leaves that are not shared.
    """

    def one(x: Any, is_shared: bool) -> Any:
        dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
        shape = np.shape(x)[0 if is_shared else leading_axes :]
        weak = getattr(x, "weak_type", False)
        if isinstance(x, jax.Array) and jax.typeof(x).memory_space == HOST:
            # A `jax.ShapeDtypeStruct` without a mesh cannot say in which memory it is.
            return jax.core.ShapedArray(shape, dtype, weak, memory_space=HOST)
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)

    return list(map(one, jax.tree.leaves(tree), shared_flags(tree)))


def check_numbers(tree: Tree) -> None:
    """Raises ValueError for a leaf that is neither an array nor a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Ref):
            raise ValueError(
                "every leaf must be an array or a number, got a jax.Ref at "
                f"{jax.tree_util.keystr(path) or 'the top'}: pass its value, ref[...], and "
                "return the new value"
            )
        if not hasattr(leaf, "dtype") and np.asarray(leaf).dtype.kind not in "biufc":
            raise ValueError(
                f"every leaf must be an array or a number, got {leaf!r} at "
                f"{jax.tree_util.keystr(path) or 'the top'}; of an Equinox module pass "
                f"`eqx.filter(module, eqx.is_array)`; {STATIC}"
            )


def check_rows(tree: Tree, rows: int, whose: str) -> None:
    """Raises ValueError unless every leaf that is not shared has a leading axis of rows."""
    check_numbers(tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), shared in zip(leaves, shared_flags(tree)):
        if not shared and np.shape(leaf)[:1] != (rows,):
            static = "" if np.ndim(leaf) else f"; {STATIC}"
            raise ValueError(
                f"every leaf must have a leading axis of {rows} ({whose}), got "
                f"shape {np.shape(leaf)} at {jax.tree_util.keystr(path) or 'the top'}"
                "; `replicate` gives every worker a copy of one tree, `share` marks "
                f"a tree without such an axis{static}{_in_rows(np.shape(leaf), rows)}"
            )


def _in_rows(shape: tuple[int, ...], rows: int) -> str:
    """The advice for a batch of all workers, in a message; empty for other shapes."""
    if not shape or shape[0] <= rows or shape[0] % rows:
        return ""
    divided = ", ".join(map(str, (rows, shape[0] // rows, *shape[1:])))
    return f"; a batch of all workers is divided by `x.reshape({divided})`"


def typed_alike(x: Array, like: Array) -> Array:
    """Returns x, typed as varying also over the axes over which `like` varies."""
    own, other = (jax.typeof(a).manual_axis_type.varying for a in (x, like))
    missing = tuple(other - own)
    return lax.pcast(x, missing, to="varying") if missing else x
