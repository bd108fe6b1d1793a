"""Parts and fragments: the leaves that a pull exchanges.

A part is a choice of leaves, by path, by a mask, or by a function. A fragment is one of F
runs of neighboring leaves of a part; the fragments take turns. If layers are stacked in one
leaf for `jax.lax.scan`, a run begins and ends between layers. Leaves outside the part
(frozen leaves) are not sent, are not moved, and have no state. Leaves that do not hold
floats are never exchanged.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from lsgd_jax._src.checks import check_period, check_positive_int
from lsgd_jax._src.complex_leaves import without_parts
from lsgd_jax._src.trees import Tree


class Fragment(NamedTuple):
    """One of `count` runs of neighboring leaves; `fragment` explains the fields."""

    index: int
    count: int
    part: "Part | None" = None
    scan_axis: "ScanAxis | None" = None


ScanAxis = int | Mapping[str, int]

Mask = Mapping[str, Any] | tuple[Any, ...] | bool  # a tree of bools; any other also works
Part = Fragment | Callable[[str], bool] | list[str] | tuple[str, ...] | Mask


def fragment(
    index: int, count: int, part: Part | None = None, scan_axis: ScanAxis | None = None
) -> Fragment:
    """Returns one of `count` runs of neighboring leaves of about the same size.

    Leaves are taken in the order of `jax.tree.leaves`, and every run has at least one leaf.
    Leaves with a scan axis are cut along it: layer 0 of all of them comes first, then layer
    1. The fragments of a pull, see `Pull`, share one state and their programs if all leaves
    of the part have the axis and are cut into equal runs.

    Args:
      index: the index of the run, in 0..count-1.
      count: the number of runs.
      part: the leaves that the runs divide, as for `Pull`. Defaults to all.
      scan_axis: the axis along which layers are stacked, for all leaves that have it, or by
        path (``{"decoder/layers": 0}``; all other leaves are not cut). With None, no leaf
        is cut.

    Raises:
      ValueError: a count below 1, an index outside 0..count-1, a negative axis; in `init`,
        more fragments than leaves and layers, an axis that no leaf has.

    >>> import lsgd_jax as lj
    >>> halves = [lj.fragment(i, 2, part=["body"]) for i in range(2)]
    >>> halves[1].index
    1
    """
    check_positive_int("count", count)
    check_period("index", index, count)
    if isinstance(part, Fragment) and part.scan_axis is not None:
        raise ValueError(f"`part` must not have a `scan_axis` of its own, got {part=}")
    axes = scan_axis.values() if isinstance(scan_axis, Mapping) else [scan_axis]
    if scan_axis is not None and not all(type(axis) is int and axis >= 0 for axis in axes):
        raise ValueError(
            "`scan_axis` must be an axis of at least 0, or a dict from paths to such axes, "
            f"got {scan_axis=}"
        )
    return Fragment(index, count, part, scan_axis)


def check_cut(
    every: Any, count: Any, part: Part | None, scan_axis: Any, offset: Any
) -> None:
    """Raises ValueError unless a pull with this period and part can have fragments."""
    check_positive_int("fragments", count)
    if isinstance(offset, tuple) and not len({*offset}) == len(offset) == count:
        raise ValueError(
            "`offset` must be an int, or a tuple of one for each fragment, all different, "
            f"got {offset=} for fragments={count}"
        )
    if count == 1:
        return
    if not isinstance(every, int):
        raise ValueError(
            "`fragments` must be 1 where the period changes, because they take turns in "
            f"one period, got fragments={count} and a period of {every}"
        )
    if every % count and not isinstance(offset, tuple):
        divisors = [n for n in range(1, every + 1) if every % n == 0]
        raise ValueError(
            f"`fragments` must divide the period of every pull, got fragments={count} "
            f"and a period of {every}, which {', '.join(map(str, divisors))} divide"
        )
    if isinstance(part, Fragment):
        raise ValueError(
            f"`fragments` must be given once, got fragments={count} for pulls that are in "
            f"{part.count} fragments"
        )
    fragment(0, count, part, scan_axis)


def check_part(part: Part | None) -> None:
    """Raises ValueError unless it is a function, paths, a mask or a `fragment`."""
    if part is None or isinstance(part, Fragment):
        return
    if not (_is_mask(part) or callable(part) or _are_paths(part)):
        raise ValueError(
            "`part` must be a function from a path to bool, a list of paths such as "
            "['head'], a tree of bools like the parameters, or a fragment, got "
            f"part={part!r}"
        )


class LeafRun(NamedTuple):
    """`size` indices from `start`, which may be an array, along an axis of a leaf."""

    axis: int
    start: Any
    size: int

    def of(self, leaf: Any) -> Any:
        """Returns this run of a leaf."""
        if isinstance(self.start, jax.Array):
            return jax.lax.dynamic_slice_in_dim(leaf, self.start, self.size, self.axis)
        indices = slice(self.start, self.start + self.size)
        return leaf[(slice(None),) * self.axis + (indices,)]

    def at(self, i: Any) -> "LeafRun":
        """The i-th of runs of this size."""
        return self._replace(start=i * self.size)


def select(part: Part | None, tree: Tree) -> Tree:
    """Replaces every leaf outside the part by an empty node.

    A leaf that fragments cut is replaced by the fragment's run of it.

    Raises:
      ValueError: no leaf in the part, a mask without an entry for a leaf, fewer leaves than
        fragments.

    >>> import numpy as np
    >>> tree = {"body": {"w": np.zeros(3)}, "head": np.zeros(2)}
    >>> jax.tree.map(np.shape, select(["body"], tree))
    {'body': {'w': (3,)}, 'head': MaskedNode()}
    >>> jax.tree.map(np.shape, select(fragment(1, 2), tree))
    {'body': {'w': MaskedNode()}, 'head': (2,)}
    >>> jax.tree.map(np.shape, select({"body": False, "head": True}, tree))
    {'body': {'w': MaskedNode()}, 'head': (2,)}
    """
    if part is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)

    def taken(leaf: Any, run: LeafRun | bool) -> Any:
        if isinstance(run, LeafRun):
            return run.of(leaf)
        return leaf if run else optax.MaskedNode()

    return jax.tree.unflatten(treedef, map(taken, leaves, runs_of(part, tree)))


def put_back(part: Part | None, mine: Tree, tree: Tree) -> Tree:
    """Puts the part back into the tree: the inverse of `select`."""
    if part is None:
        return mine
    leaves, treedef = jax.tree.flatten(tree)

    def put(leaf: Any, run: LeafRun | bool, mine: Any) -> Any:
        if not isinstance(run, LeafRun):
            return mine if run else leaf
        return jax.lax.dynamic_update_slice_in_dim(
            leaf, mine.astype(leaf.dtype), run.start, run.axis
        )

    parts = treedef.flatten_up_to(mine)
    return jax.tree.unflatten(treedef, map(put, leaves, runs_of(part, tree), parts))


def runs_of(part: Part | None, tree: Tree) -> list[LeafRun | bool]:
    """The run of each leaf that is in the part: True for all of it, False, or a `LeafRun`.

    Raises:
      ValueError: see `select`.
    """
    check_part(part)
    if part is None:
        return [True] * len(jax.tree.leaves(tree))
    if isinstance(part, Fragment) and isinstance(part.index, jax.Array):
        first = _runs_of_fragment(part._replace(index=0), tree)  # all are alike
        return [isinstance(run, LeafRun) and run.at(part.index) for run in first]
    if isinstance(part, Fragment):
        return _runs_of_fragment(part, tree)
    held = taken(part, tree)
    if held and not any(held):
        paths = _paths(tree)
        raise ValueError(
            f"`part` must hold at least one leaf, got {part=} for the leaves "
            f"{', '.join(map(repr, paths[:8]))}{', …' * (len(paths) > 8)}"
        )
    return [*held]


def taken(part: Any, tree: Tree) -> list[bool]:
    """Returns for each leaf whether it is in a part that is no fragment."""
    paths = _paths(tree)
    if callable(part) and not _is_mask(part):
        return [bool(part(path)) for path in paths]
    if _are_paths(part):
        return [any(_is_under(path, start) for start in part) for path in paths]
    marks = jax.tree_util.tree_leaves_with_path(part)
    marks = [(_name(start), bool(take)) for start, take in marks]
    found = [[take for start, take in marks if _is_under(path, start)] for path in paths]
    if [] in found:
        path = paths[found.index([])]
        raise ValueError(f"the mask `part` must have a bool for {path!r}, got {part!r}")
    return [take for take, *_ in found]


def cuts_all(part: Part | None, scan_axis: ScanAxis | None) -> bool:
    """Whether `scan_axis` is an axis of all leaves of the part, as far as paths tell."""
    if not isinstance(scan_axis, Mapping):
        return scan_axis is not None
    paths: Any = part if _are_paths(part) else [""]
    return all(any(_is_under(path, at) for at in scan_axis) for path in paths)


def _runs_of_fragment(fragment: Fragment, tree: Tree) -> list[LeafRun | bool]:
    """Orders leaves and layers in a row, of which every fragment takes a run.

    A stack of layers comes after the leaves that precede it. Without `scan_axis`, the row
    has the order of the leaves.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:  # `optax.tree_map_params` calls `init` with a tree that has none
        return []
    inside = runs_of(fragment.part, tree)
    axes = [_scan_axis(fragment.scan_axis, path, leaf) for path, leaf in leaves]
    if fragment.scan_axis is not None and not any(
        axis is not None and taken for (axis, _), taken in zip(axes, inside)
    ):
        raise ValueError(
            "`scan_axis` must be an axis of at least one leaf, got "
            f"scan_axis={fragment.scan_axis!r}"
        )
    row = _row(leaves, inside, axes)
    owners = dict(zip(row, _owners([*row.values()], fragment.count)))

    def run(i: int, leaf: Any) -> LeafRun | bool:
        axis, stack = axes[i]
        if axis is None or not inside[i]:
            return owners.get(i) == fragment.index
        layers = leaf.shape[axis]
        mine = [k for k in range(layers) if owners[stack, layers, k] == fragment.index]
        return LeafRun(axis, mine[0], len(mine)) if mine else False

    return [run(i, leaf) for i, (_, leaf) in enumerate(leaves)]


def _row(leaves: list[Any], inside: list[Any], axes: list[Any]) -> dict[Any, int]:
    """The sizes of all units in order: of a leaf that is not cut, or a layer of stacks."""
    sizes: dict[Any, int] = {}
    depth: dict[Any, float] = {}  # the position in the row, which several stacks share
    for i, ((_, leaf), (axis, stack)) in enumerate(zip(leaves, axes)):
        layers = 1 if axis is None else leaf.shape[axis]
        is_behind = any(0 < d < 1 for d in depth.values())
        for layer in range(layers if inside[i] else 0):
            unit = i if axis is None else (stack, layers, layer)
            sizes[unit] = sizes.get(unit, 0) + leaf.size // layers
            depth[unit] = (layer + 0.5) / layers if axis is not None else float(is_behind)
    return {unit: sizes[unit] for unit in sorted(sizes, key=lambda unit: depth[unit])}


def _scan_axis(
    scan_axis: ScanAxis | None, path: Any, leaf: Any
) -> tuple[int | None, str | None]:
    """The axis along which a leaf is a stack of layers, and the path of the stack."""
    if isinstance(scan_axis, Mapping):
        name = _name(path)
        found = [(axis, at) for at, axis in scan_axis.items() if _is_under(name, at)]
        axis, stack = found[0] if found else (None, None)
    else:
        axis = scan_axis
        stack = None
    is_stack = axis is not None and axis < leaf.ndim and leaf.shape[axis] > 1
    return (axis, stack) if is_stack else (None, None)


def _is_mask(part: Any) -> bool:
    """Whether it is a tree of bools, which may itself be callable, as modules are."""
    leaves = jax.tree.leaves(part)
    return bool(leaves) and all(isinstance(x, bool | np.bool_) for x in leaves)


def _are_paths(part: Any) -> bool:
    is_list = isinstance(part, list | tuple)
    return is_list and bool(part) and all(isinstance(path, str) for path in part)


def _is_under(path: str, start: str) -> bool:
    return not start or path == start or path.startswith(f"{start}/")


def _paths(tree: Tree) -> list[str]:
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(without_parts(path), simple=True, separator="/")


def _owners(sizes: list[int], count: int) -> list[int]:
    """The fragment of each leaf or layer: the one that contains its middle, by size."""
    if len(sizes) < count:
        raise ValueError(
            f"`fragments` must be at most the number of leaves ({len(sizes)}), got {count}"
            "; `scan_axis` cuts leaves in which layers are stacked"
        )
    ends = np.cumsum(sizes)
    owners = ((ends - np.array(sizes) / 2) * count / ends[-1]).astype(int)
    # No fragment may be empty: enough leaves must remain for the later fragments.
    for i in range(len(sizes)):
        first = owners[i - 1] if i else -1
        owners[i] = min(max(owners[i], 0), first + 1)
        owners[i] = max(owners[i], count - (len(sizes) - i), first, 0)
    return owners.tolist()
