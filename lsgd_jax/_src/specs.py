"""Where the leaves of a worker that is sharded over several devices are to lie."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.checks import check_positive_int
from lsgd_jax._src.layouts import names_of, of_arguments
from lsgd_jax._src.transfer import map_flagged, of_one, shared_flags
from lsgd_jax._src.trees import Tree


Specs = Any  # a prefix tree of PartitionSpec, or a function (path, leaf) -> PartitionSpec


def check_inside(inside: Mapping[str, int] | None, taken: Iterable[str]) -> dict[str, int]:
    """The sizes of the axes inside a worker; raises ValueError for what cannot be one."""
    if not isinstance(inside or {}, Mapping):
        raise ValueError(
            "`inside` must be a dict from the names of mesh axes to their sizes, such as "
            f"{{'fsdp': 4}}, got inside={inside!r}"
        )
    for name, size in (inside or {}).items():
        if not isinstance(name, str) or not name.isidentifier() or name in taken:
            raise ValueError(
                "a name in `inside` must be an identifier, and none of "
                f"{', '.join(map(repr, taken))}, got {name!r}"
            )
        check_positive_int(f"inside[{name!r}]", size)
    return {name: int(size) for name, size in (inside or {}).items()}


def spread(specs: Specs, tree: Tree, sizes: Mapping[str, int]) -> list[Spec]:
    """One spec for every leaf of one worker's tree.

    Args:
      specs: a prefix tree of `PartitionSpec`s, or a function of a leaf's path ('a/b') and
        the leaf; None: nothing is sharded.
      tree: of `jax.ShapeDtypeStruct`.
      sizes: the axes inside a worker and their sizes.

    Raises:
      ValueError: a spec that names another axis, is longer than the shape of its leaf, or
        does not divide it; specs that are no prefix of the tree.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if callable(specs):
        name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
        each = [specs(name(path), leaf) for path, leaf in leaves]
    else:
        each = _broadcast(specs, tree)
    for (path, leaf), spec in zip(leaves, each):
        _check_spec(jax.tree_util.keystr(path), leaf.shape, spec, sizes)
    return each


def largest_dimension(
    axis: str | tuple[str, ...], size: int, smallest: int = 2**12
) -> Callable[[str, Any], Spec]:
    """Specs that shard the largest dimension of each leaf which `size` divides.

    Args:
      axis: the name of the axis inside the workers, or of several.
      size: its size, or their product.
      smallest: leaves with fewer elements are not sharded.

    Returns:
      A function (path, leaf) -> PartitionSpec, for `Workers.put` and its kin.

    >>> import jax, lsgd_jax as lj
    >>> from jax.sharding import PartitionSpec as P
    >>> specs = lj.largest_dimension("fsdp", 4)
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
    """Specs by which other trees lie as this one does: a state as the parameters do.

    Args:
      placed: arrays over all workers, as `Workers.put` returns them.

    Returns:
      A function (path, leaf) -> PartitionSpec, for `Workers.put` and its kin: the spec of
      the placed leaf of the same shape whose path ends most alike; not sharded if there is
      none.

    >>> import lsgd_jax as lj, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> workers = lj.Workers(nodes=2, inside={"fsdp": 4})
    >>> params = workers.put({"w": np.ones([2, 8])}, specs=P("fsdp"))
    >>> momentum = workers.put({"mu": {"w": np.zeros([2, 8])}}, lj.following(params))
    >>> momentum["mu"]["w"].sharding.spec == P("node", "fsdp")
    True
    """
    rows = [0 if shared else 1 for shared in shared_flags(placed)]
    one = map_flagged(lambda x, shared: of_one(x, 0 if shared else 1), placed)
    own = [Spec(*x.sharding.spec[n:]) for x, n in zip(jax.tree.leaves(placed), rows)]
    layouts = of_arguments((one,), own)

    def spec(path: str, leaf: Any) -> Spec:
        return layouts.spec(tuple(path.split("/")), leaf.shape) or Spec()

    return spec


def _broadcast(specs: Specs, tree: Tree) -> list[Spec]:
    is_spec = lambda x: x is None or isinstance(x, Spec)
    below = lambda spec, part: [spec or Spec()] * len(jax.tree.leaves(part))
    try:
        each = jax.tree.map(below, specs, tree, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(f"`specs` must be a prefix of the tree: {error}") from error
    return jax.tree.leaves(each, is_leaf=lambda x: isinstance(x, Spec))


def _check_spec(path: str, shape: tuple, spec: Any, sizes: Mapping[str, int]) -> None:
    where = f"the spec of the leaf {path or 'at the top'}, {shape} for one worker,"
    if not isinstance(spec, Spec):
        raise ValueError(f"{where} must be a PartitionSpec, got {spec!r}")
    if any(name not in sizes for name in names_of(spec)):
        known = ", ".join(map(repr, sizes)) or "there are none, see `inside` of `Workers`"
        raise ValueError(f"{where} must name axes inside a worker ({known}), got {spec}")
    if len(spec) > len(shape):
        raise ValueError(f"{where} must have at most {len(shape)} parts, got {spec}")
    for n, part in zip(shape, spec):
        size = math.prod(sizes[name] for name in names_of(Spec(part)))
        if n % size:
            raise ValueError(
                f"{where} must divide it, but {n} is no multiple of {size} ({part!r}), "
                f"got {spec}"
            )
