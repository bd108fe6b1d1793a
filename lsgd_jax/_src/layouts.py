"""Workers that are sharded over several devices: how their leaves are laid out.

In `Workers.map` the axes of the workers are manual and those inside a worker are automatic:
a function of one worker sees unsharded arrays, and XLA decides how to shard them. It does
so badly where no input determines the layout (moments that begin as zeros). Before a
collective between workers, it gathers the shards of an array that was flattened or that the
collective gathers.
The layout must therefore be known while tracing. On explicit axes `explicit` reads it from
the types of a function's arguments. Types do not contain automatic axes, so `Workers.map`
notes the layouts of its arguments. A leaf is recognized by its shape and the end of its
path: the momentum of ``params['dense']['kernel']`` also ends with ``['dense']['kernel']``.
"""

import contextlib
import contextvars
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.complex_leaves import without_parts
from lsgd_jax._src.shared import during, one_worker, shared_flags


Tree = Any
Specs = Any  # a prefix tree of specs or of `NamedSharding`s, or (path, leaf) -> spec


# Specs that a user gives


def spread(
    specs: Specs,
    tree: Tree,
    sizes: Mapping[str, int],
    workers: Sequence[str] = (),
    shapes: Sequence[Any] | None = None,
) -> list[Spec]:
    """Returns one spec for every leaf of one worker's tree.

    Args:
      specs: a prefix tree of `PartitionSpec`s or `NamedSharding`s, or a function of a
        leaf's path ('a/b') and the leaf. None: nothing is sharded.
      tree: the worker's tree, or that of all workers if `shapes` are given.
      sizes: the axes inside a worker and their sizes.
      workers: the axes of the workers, over which a `NamedSharding` may shard, too; they
        are dropped.
      shapes: the `jax.ShapeDtypeStruct`s of one worker's leaves. Defaults to the leaves of
        the tree.

    Raises:
      ValueError: a spec that names another axis, is longer than the shape of its leaf, or
        does not divide it; specs that are no prefix of the tree.
    """
    leaves = _with_paths(tree, shapes)
    if callable(specs):

        def name(path):
            return jax.tree_util.keystr(path, simple=True, separator="/")

        each = [specs(name(path), leaf) for path, leaf in leaves]
    else:
        each = _broadcast(specs, tree)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    own = dict.fromkeys(workers, 1)
    each = [over(x.spec, own) if isinstance(x, NamedSharding) else x for x in each]
    for (path, leaf), spec in zip(leaves, each):
        try:
            sharding = NamedSharding(mesh, spec)
            sharding.check_compatible_aval(leaf.shape)
            sharding.shard_shape(leaf.shape)
        except Exception as error:
            raise ValueError(
                f"the spec of the leaf {jax.tree_util.keystr(path) or 'at the top'}, "
                f"{leaf.shape} for one worker, must be a PartitionSpec that divides it by "
                f"axes inside the worker (`inside` of `Workers`), got {spec!r}: {error}"
            ) from error
    return each


def _entry(names: tuple[str, ...]) -> Any:
    """The entry of a `Spec` for a dimension that is divided over these axes."""
    if not names:
        return None
    return names if len(names) > 1 else names[0]


def over(spec: Spec, sizes: Mapping[str, int]) -> Spec:
    """Returns the spec without the axes of size 1, over which nothing is divided.

    >>> over(Spec(("fsdp", "tensor"), "tensor"), {"fsdp": 4, "tensor": 1}) == Spec("fsdp")
    True
    """
    parts = _names_by_dimension(spec)
    left = [tuple(name for name in part if sizes.get(name) != 1) for part in parts]
    while left and not left[-1]:
        left.pop()
    return Spec(*map(_entry, left))


def _with_paths(tree: Tree, shapes: Sequence[Any] | None) -> list[tuple[Any, Any]]:
    """(path, leaf) of each leaf, with the shapes in place of the tree's own leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if shapes is None:
        return leaves
    return [(path, shape) for (path, _), shape in zip(leaves, shapes)]


def _broadcast(specs: Specs, tree: Tree) -> list[Spec]:
    """The spec of each leaf of the tree, of which `specs` is a prefix."""

    # The tree has nodes that are None, too, such as the axes of a `Shared`.
    def is_spec(x):
        return x is None or isinstance(x, Spec | NamedSharding)

    each, prefix = jax.tree.flatten(specs, is_leaf=is_spec)
    try:
        below = prefix.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"`specs` must be a prefix of the tree, {_mismatch(specs, tree, is_spec)}"
        ) from error
    broadcast = []
    for spec, subtree in zip(each, below):
        own = Spec() if spec is None else spec
        broadcast += [own] * len(jax.tree.leaves(subtree))
    return broadcast


def _mismatch(specs: Specs, tree: Tree, is_spec: Callable[[Any], bool]) -> str:
    """Where specs that are no prefix of a tree begin to differ from it, for a message."""
    path: list[str] = []
    while True:
        where = f"at {'/'.join(path)!r}" if path else "at the top"
        kinds = [type(node).__name__ for node in (tree, specs)]
        if type(specs) is not type(tree):
            return f"which has a {kinds[0]} {where}, got a {kinds[1]}"
        own = dict(children(tree))
        given = dict(children(specs))
        if own.keys() != given.keys():
            return f"which has {_listed(own)} {where}, got {_listed(given)}"
        differ = [x for x in own if not _is_prefix(given[x], own[x], is_spec)]
        if not differ:
            return (
                f"but the {kinds[0]} {where} has other functions or constants in its "
                "fields: make `specs` from this tree, by `jax.tree.map` or `replace`, or "
                "pass a function (path, leaf) -> PartitionSpec"
            )
        path.append(differ[0])
        specs = given[differ[0]]
        tree = own[differ[0]]


def _is_prefix(specs: Specs, tree: Tree, is_spec: Callable[[Any], bool]) -> bool:
    """Whether the specs are a prefix of the tree."""
    try:
        jax.tree.structure(specs, is_leaf=is_spec).flatten_up_to(tree)
    except ValueError:
        return False
    return True


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def largest_dimension(
    axis: str | tuple[str, ...], size: int, smallest: int = 2**12
) -> Callable[[str, Any], Spec]:
    """Returns specs that shard the largest dimension of each leaf that `size` divides.

    Args:
      axis: the name of the axis inside the workers, or several names.
      size: the size of the axis, or the product of their sizes.
      smallest: leaves with fewer elements are not sharded.

    Returns:
      A function (path, leaf) -> PartitionSpec, for `Workers.put` and its kin.

    >>> import jax, lsgd_jax as lj
    >>> from jax.sharding import PartitionSpec as P
    >>> specs = lj.layouts.largest_dimension("fsdp", 4)
    >>> leaf = jax.ShapeDtypeStruct((64, 256), "float32")
    >>> specs("dense/kernel", leaf) == P(None, "fsdp")
    True
    """

    def spec(path: str, leaf: Any) -> Spec:
        del path
        fitting = [d for d, n in enumerate(leaf.shape) if n % size == 0]
        if math.prod(leaf.shape) < smallest or not fitting:
            return Spec()
        best = max(fitting, key=lambda d: leaf.shape[d])
        return Spec(*[None] * best, axis)

    return spec


def following(placed: Tree) -> Callable[[str, Any], Spec]:
    """Returns specs that lay out other trees, such as a state, like the placed one.

    Args:
      placed: arrays over all workers, as `Workers.put` returns them.

    Returns:
      A function (path, leaf) -> PartitionSpec, for `Workers.put` and its kin. It returns
      the spec of the placed leaf of the same shape that has the longest end of the path in
      common. A leaf without such a counterpart is not sharded.

    >>> import lsgd_jax as lj, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> workers = lj.Workers(nodes=2, inside={"fsdp": 4})
    >>> params = workers.put({"w": np.ones([2, 8])}, specs=P("fsdp"))
    >>> momentum = {"mu": {"w": np.zeros([2, 8])}}
    >>> momentum = workers.put(momentum, lj.layouts.following(params))
    >>> momentum["mu"]["w"].sharding.spec == P("node", "fsdp")
    True
    """
    rows = [0 if shared else 1 for shared in shared_flags(placed)]
    own = [
        over(Spec(*x.sharding.spec[n:]), x.sharding.mesh.shape)
        for x, n in zip(jax.tree.leaves(placed), rows)
    ]
    layouts = Layouts((placed,), own, one_worker(placed))
    return lambda path, leaf: layouts.spec(tuple(path.split("/")), leaf.shape) or Spec()


# Layouts that are known while tracing


class Layouts:
    """How leaves are laid out on the axes inside a worker, by path and shape.

    A path of one key belongs to an argument that is a bare array. Such a path carries no
    name, so the shape alone decides.

    Args:
      args: the arguments of a function of one worker, or, if `shapes` are given, those of
        the function of all workers.
      specs: the spec of each leaf, or None if it is not known.
      shapes: the leaves of one worker, anything with a shape. Defaults to those of `args`.

    >>> args = ({"dense": {"kernel": np.zeros((8, 2))}},)
    >>> layouts = Layouts(args, [Spec("fsdp")])
    >>> layouts.spec(("mu", "dense", "kernel"), (8, 2)) == Spec("fsdp")
    True
    >>> layouts.spec(("mu", "dense", "bias"), (8, 2)) is None
    True
    >>> layouts.spec(("anchor", "dense", "kernel"), (8, 1)) == Spec("fsdp")  # a fragment
    True
    """

    def __init__(
        self,
        args: Tree,
        specs: Iterable[Spec | None],
        shapes: Sequence[Any] | None = None,
    ):
        self._by_shape: dict[tuple[int, ...], list[tuple[tuple[str, ...], Spec]]] = {}
        for (path, leaf), spec in zip(_with_paths(args, shapes), specs):
            if spec is not None:
                same = self._by_shape.setdefault(np.shape(leaf), [])
                same.append((keys(path), spec))

    def __len__(self) -> int:
        return sum(map(len, self._by_shape.values()))

    def spec(self, path: tuple[str, ...], shape: tuple[int, ...]) -> Spec | None:
        """The spec of the known leaf of that shape whose path ends most alike, if any."""

        def alike(known):
            return _common_end(known, path) or 0.5 * (len(known) == 1)

        found = [(alike(own), spec) for own, spec in self._by_shape.get(shape, ())]
        best = _most_alike(found)
        return self._of_piece(path, shape) if best is None else best

    def _of_piece(self, path: tuple[str, ...], shape: tuple[int, ...]) -> Spec | None:
        """The spec of the leaf from which fragments have cut this piece.

        The piece is smaller along one axis, which is not sharded.
        """
        found = []
        for known, leaves in self._by_shape.items():
            cut = [d for d, (n, m) in enumerate(zip(known, shape)) if n != m]
            if len(known) != len(shape) or len(cut) != 1 or shape[cut[0]] > known[cut[0]]:
                continue
            for own, spec in leaves:
                along = spec[cut[0]] if cut[0] < len(spec) else None
                # A leaf that is not sharded says nothing about its pieces.
                if along is None and names_of(spec):
                    found.append((_common_end(own, path), spec))
        return _most_alike(found)

    def of_leaves(self, tree: Tree) -> list[Spec | None]:
        """The spec of every leaf, None where it is not known."""
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return [self.spec(keys(path), np.shape(leaf)) for path, leaf in leaves]

    def specs(self, tree: Tree) -> Tree:
        """The spec of every leaf, as a tree; leaves of unknown layout are not sharded."""
        each = [Spec() if spec is None else spec for spec in self.of_leaves(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), each)

    def laid_out(self, tree: Tree) -> Tree:
        """The tree, with a constraint on the leaves of known layout."""
        leaves, structure = jax.tree.flatten(tree)
        place = jax.lax.with_sharding_constraint
        each = zip(leaves, self.of_leaves(tree))
        return structure.unflatten(
            x if spec is None else place(x, spec) for x, spec in each
        )


_Variable = contextvars.ContextVar[Layouts | None]
_KNOWN: _Variable = contextvars.ContextVar("known", default=None)
# The layouts that types of explicit axes tell, where arrays cannot be taken apart by them.
TYPED: _Variable = contextvars.ContextVar("typed", default=None)


def known(layouts: Layouts | None) -> contextlib.AbstractContextManager:
    """Makes the layouts known to everything that is traced in the `with` block."""
    return during(_KNOWN, layouts)


def of_known(tree: Tree) -> list[Spec | None]:
    """The spec of every leaf, None where it is not known."""
    layouts = _KNOWN.get()
    if layouts is None:
        return [None] * len(jax.tree.leaves(tree))
    return layouts.of_leaves(tree)


def on_one_device() -> contextlib.AbstractContextManager:
    """Declares that nothing is sharded in the `with` block."""
    return known(Layouts((), ()))


def inside_axes() -> tuple[str, ...]:
    """Returns the axes inside a worker, in a function of one worker while it is traced.

    Returns:
      The names of the automatic or explicit axes of the mesh that are larger than 1; none
      outside of `Workers.map` and of `asynchronous.island`.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=2, inside={"fsdp": 4})
    >>> count = workers.map(lambda x: x + len(lj.layouts.inside_axes()))
    >>> count(workers.put(jnp.zeros(2))).tolist()
    [1.0, 1.0]
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes)
    return tuple(name for name, kind, n in kinds if kind != AxisType.Manual and n > 1)


def known_axes() -> tuple[str, ...]:
    """The automatic axes if the layout of leaves on them is known, otherwise none."""
    return inside_axes() if _KNOWN.get() else ()


def may_be_sharded() -> bool:
    """Whether XLA may hold an array in shards here, so that joining arrays gathers them."""
    mesh = jax.sharding.get_abstract_mesh()
    workers = math.prod(map(mesh.shape.__getitem__, mesh.manual_axes))
    # Without manual axes, a `jax.jit` of the user's own may shard what it likes.
    return mesh.size > workers or (_KNOWN.get() is None and not mesh.manual_axes)


def layout_is_known() -> bool:
    """Whether the layout of arrays on the devices is known.

    It is known in `Workers.map`, and where all axes are manual. It is unknown under a
    `jax.vmap` or a `jax.jit` of the user's own.
    """
    return _KNOWN.get() is not None or not may_be_sharded()


def whole_rows(rows: jax.Array) -> jax.Array:
    """Rows [n, ...], of which every device holds all where the layout is not known."""
    if layout_is_known() or not inside_axes():
        return rows
    free = [Spec.UNCONSTRAINED] * (rows.ndim - 1)
    return lax.with_sharding_constraint(rows, Spec(None, *free))


def shard_by_shard(
    fn: Callable, *trees: Tree, out: Callable[..., Tree] = lambda specs, *_: specs
) -> Tree:
    """Applies fn to the trees on each device of a worker, which sees its own shards.

    Args:
      fn: from trees of shards to trees of shards. The axes inside the worker are bound, for
        collectives over all devices of the worker.
      *trees: leaves that are not known to be sharded arrive unsharded.
      out: from the specs of the trees to the specs of what fn returns. Defaults to those
        of the first tree.
    """
    axes = known_axes()
    layouts = _KNOWN.get()
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


def sharded_over(tree: Tree) -> list[tuple[str, ...]]:
    """For each leaf the axes inside a worker over which it is known to be sharded."""
    return [tuple(itertools.chain(*each)) for each in axes_by_dimension(tree)]


def axes_by_dimension(tree: Tree) -> list[list[tuple[str, ...]]]:
    """For each leaf the axes over which each dimension is sharded in `shard_by_shard`."""
    axes = known_axes()
    layouts = _KNOWN.get()
    if not axes or layouts is None:
        return [[]] * len(jax.tree.leaves(tree))
    return [_names_by_dimension(spec or Spec()) for spec in layouts.of_leaves(tree)]


def shard_nbytes(tree: Tree) -> int:
    """The bytes of a tree on each device of a worker."""
    sizes = jax.sharding.get_abstract_mesh().shape
    parts = [math.prod(sizes[name] for name in axes) for axes in sharded_over(tree)]
    return sum(x.size * x.dtype.itemsize // n for x, n in zip(jax.tree.leaves(tree), parts))


def element(x: jax.Array, index: tuple[int, ...], path: Any = ()) -> jax.Array:
    """Returns x[index]; from a sharded x it moves no more than this element."""
    axes = known_axes()
    layouts = _KNOWN.get()
    spec = layouts.spec(keys(path), x.shape) if axes and layouts else None
    if spec is None or not names_of(spec):
        return x[index]
    own = [*spec, *[None] * (x.ndim - len(spec))]
    # Among the devices that hold the same shard, only the first one contributes.
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
    """The keys of a path as plain strings: both .w and ['w'] become 'w'."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in without_parts(path))


def children(tree: Tree) -> list[tuple[str, Tree]]:
    """The names and values of the nodes below the top of a tree; none for a leaf.

    >>> children({"a": (1, 2), "b": 3})
    [('a', (1, 2)), ('b', 3)]
    """
    below = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(keys(path)[0], child) for path, child in below if path]


def _common_end(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def _most_alike(found: Sequence[tuple[float, Spec]]) -> Spec | None:
    """The spec of the highest positive score, the first one if there are several."""
    score, best = max(found, key=lambda each: each[0], default=(0, None))
    return best if score > 0 else None


def names_of(spec: Spec) -> list[str]:
    """All axes that a spec names."""
    return [name for part in _names_by_dimension(spec) for name in part]


def _names_by_dimension(spec: Spec) -> list[tuple[str, ...]]:
    """The axes over which each dimension is sharded."""
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
