"""Workers that are sharded over several devices: the layout of their leaves.

In `Workers.map` the axes of the workers are manual and those inside a worker automatic: a
function of one worker sees whole arrays, and XLA decides where they lie. It decides badly
where nothing leads it (moments that begin as zeros), and for collectives between workers of
what was flattened or is gathered: it gathers the shards first. There the layout must be
known while tracing, and types do not tell it. So `Workers.map` notes the layouts of its
arguments, and a leaf is known by its shape and the end of its path: the momentum of
``params['dense']['kernel']`` ends with ``['dense']['kernel']``, too.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec


Tree = Any


class Leaf(NamedTuple):
    """Where one leaf of a worker lies: its path, the worker's own shape, its spec."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    spec: Spec


class Layouts:
    """How leaves lie on the axes inside a worker, by path and shape.

    Args:
      leaves: what is known. A path of one key is an argument that is a bare array: its name
        says nothing, and its shape is enough.

    >>> layouts = Layouts([Leaf(("0", "dense", "kernel"), (8, 2), Spec("fsdp"))])
    >>> layouts.spec(("mu", "dense", "kernel"), (8, 2)) == Spec("fsdp")
    True
    >>> layouts.spec(("mu", "dense", "bias"), (8, 2)) is None
    True
    """

    def __init__(self, leaves: Iterable[Leaf]):
        self._by_shape: dict[tuple[int, ...], list[Leaf]] = {}
        for leaf in leaves:
            self._by_shape.setdefault(leaf.shape, []).append(leaf)

    def __len__(self) -> int:
        return sum(map(len, self._by_shape.values()))

    def spec(self, path: tuple[str, ...], shape: tuple[int, ...]) -> Spec | None:
        """The spec of the known leaf of that shape whose path ends most alike, if any."""
        best, common = None, 0
        for leaf in self._by_shape.get(shape, ()):
            alike = _common_end(leaf.path, path) or 0.5 * (len(leaf.path) == 1)
            if alike > common:
                best, common = leaf.spec, alike
        return self._of_piece(path, shape) if best is None else best

    def _of_piece(self, path: tuple[str, ...], shape: tuple[int, ...]) -> Spec | None:
        """The spec of the leaf of which fragments have cut this piece off.

        It is smaller along one axis, which is not sharded. Among several pieces of one leaf
        the path has an index at its end.
        """
        best, common = None, 0
        for known, leaves in self._by_shape.items():
            cut = [d for d, (n, m) in enumerate(zip(known, shape)) if n != m]
            if len(known) != len(shape) or len(cut) != 1 or shape[cut[0]] > known[cut[0]]:
                continue
            for leaf in leaves:
                along = leaf.spec[cut[0]] if cut[0] < len(leaf.spec) else None
                alike = max(_common_end(leaf.path, p) for p in (path, path[:-1]))
                # A leaf that is not sharded says nothing about its pieces.
                if along is None and names_of(leaf.spec) and alike > common:
                    best, common = leaf.spec, alike
        return best

    def of_leaves(self, tree: Tree) -> list[Spec | None]:
        """The spec of every leaf, None where it is not known."""
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return [self.spec(keys(path), np.shape(leaf)) for path, leaf in leaves]

    def specs(self, tree: Tree) -> Tree:
        """The same as a tree; what is not known is not sharded."""
        each = [Spec() if spec is None else spec for spec in self.of_leaves(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), each)


def of_arguments(args: Tree, specs: Iterable[Spec | None]) -> Layouts:
    """The layouts of a function's arguments, of which each leaf's spec may be known."""
    leaves = zip(jax.tree_util.tree_leaves_with_path(args), specs)
    return Layouts(
        Leaf(keys(path), np.shape(leaf), spec)
        for (path, leaf), spec in leaves
        if spec is not None
    )


_KNOWN: contextvars.ContextVar[Layouts | None] = contextvars.ContextVar(
    "known", default=None
)


@contextlib.contextmanager
def known(layouts: Layouts | None) -> Iterator[None]:
    """Makes the layouts known to what is traced in the `with` block."""
    token = _KNOWN.set(layouts)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def on_one_device() -> contextlib.AbstractContextManager:
    """Makes known that nothing is sharded in the `with` block."""
    return known(Layouts(()))


def inside_axes() -> tuple[str, ...]:
    """The axes inside a worker, as a function of one worker finds them while it is traced.

    Returns:
      The names of the automatic axes of the mesh that are larger than 1; none outside of
      `Workers.map`.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=2, inside={"fsdp": 4})
    >>> count = workers.map(lambda x: x + len(lj.inside_axes()))
    >>> count(workers.put(jnp.zeros(2))).tolist()
    [1.0, 1.0]
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes)
    return tuple(name for name, kind, n in kinds if kind == AxisType.Auto and n > 1)


def known_axes() -> tuple[str, ...]:
    """The automatic axes if it is known how leaves lie on them, else none."""
    return inside_axes() if _KNOWN.get() else ()


def may_be_sharded() -> bool:
    """Whether XLA may hold an array in shards here: to join arrays may gather them."""
    return bool(inside_axes()) or not layout_is_known()


def layout_is_known() -> bool:
    """Whether it is known how arrays lie on the devices.

    It is in `Workers.map`, and where all axes are manual; not under a `jax.vmap` or a
    `jax.jit` of the user's own.
    """
    if _KNOWN.get() is not None:
        return True
    return bool(jax.sharding.get_abstract_mesh().manual_axes) and not inside_axes()


def shard_by_shard(fn: Callable, *trees: Tree, out: Callable[..., Tree]) -> Tree:
    """fn of the trees, by each device of a worker on its own shards.

    Args:
      fn: from trees of shards to trees of shards. The axes inside the worker are bound, for
        what must go over the whole worker.
      *trees: what is not known to be sharded comes whole.
      out: from the specs of the trees to those of what fn returns.
    """
    axes, layouts = known_axes(), _KNOWN.get()
    if not axes or layouts is None:
        return fn(*trees)
    specs = tuple(map(layouts.specs, trees))
    mapped = jax.shard_map(
        fn,
        in_specs=specs,
        out_specs=out(*specs),
        axis_names=set(axes),
        check_vma=False,
    )
    return mapped(*trees)


def shard_nbytes(tree: Tree) -> int:
    """Bytes of a tree on each device of a worker; all of them where nothing is sharded."""
    layouts = _KNOWN.get() if inside_axes() else None
    leaves = jax.tree.leaves(tree)
    if layouts is None:
        return sum(x.size * x.dtype.itemsize for x in leaves)
    sizes = jax.sharding.get_abstract_mesh().shape
    parts = (
        math.prod(sizes[name] for name in names_of(spec or Spec()))
        for spec in layouts.of_leaves(tree)
    )
    return sum(x.size * x.dtype.itemsize // n for x, n in zip(leaves, parts))


def element(x: jax.Array, index: tuple[int, ...], path: Any = ()) -> jax.Array:
    """x[index], of one that is sharded without moving more than this element."""
    axes, layouts = known_axes(), _KNOWN.get()
    spec = layouts.spec(keys(path), x.shape) if axes and layouts else None
    if spec is None or not names_of(spec):
        return x[index]
    own = [*spec, *[None] * (x.ndim - len(spec))]
    # Of the devices that hold the same shard the first one speaks.
    copies = tuple(name for name in axes if name not in names_of(spec))

    def pick(shard: jax.Array) -> jax.Array:
        mine = lax.axis_index(copies) == 0 if copies else jnp.asarray(True)
        nearest = []
        for i, names, n in zip(index, own, shard.shape):
            owner, at = divmod(i, n)
            mine &= lax.axis_index(names) == owner if names else True
            nearest.append(at)
        return lax.psum(jnp.where(mine, shard[tuple(nearest)], 0), axes)

    return jax.shard_map(
        pick, in_specs=spec, out_specs=Spec(), axis_names=set(axes), check_vma=False
    )(x)


def keys(path: Any) -> tuple[str, ...]:
    """The keys of a path without what kind they are of: 'w' is .w and ['w']."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _common_end(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def names_of(spec: Spec) -> list[str]:
    """All axes that a spec names."""
    nested = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
    return [name for part in nested for name in part]
