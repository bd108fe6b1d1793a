"""Parts and fragments: the leaves that a pull takes.

A part is any choice of leaves: by path, by a mask, or by a function. A fragment is one of F
runs of neighboring leaves of a part, which take turns. Leaves outside of the part (frozen
ones) are not sent, are not moved, and have no state. Leaves that do not hold floats are
never exchanged, whatever the part says.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from lsgd_jax._src.checks import check_period, check_positive_int
from lsgd_jax._src.trees import Tree


class Fragment(NamedTuple):
    """One of `count` runs of neighboring leaves of about the same size.

    Attributes:
      index: which one.
      count: how many there are.
      part: the leaves that the runs divide; None: all.
    """

    index: int
    count: int
    part: "Part | None" = None


Mask = Mapping[str, Any] | tuple[Any, ...] | bool  # a tree of bools; any other also works
Part = Fragment | Callable[[str], bool] | list[str] | tuple[str, ...] | Mask


def fragment(index: int, count: int, part: Part | None = None) -> Fragment:
    """The `index`-th of `count` runs of neighboring leaves of about the same size.

    Leaves are taken in the order of `jax.tree.leaves`; every run has at least one.

    Args:
      index: which run, in 0..count-1.
      count: how many runs.
      part: the leaves that the runs divide, as for `Pull`; None: all.

    Raises:
      ValueError: a count below 1, an index outside 0..count-1; in `init`, more fragments
        than leaves.

    >>> import lsgd_jax as lj
    >>> halves = [lj.fragment(i, 2, part=["body"]) for i in range(2)]
    >>> halves[1].index
    1
    """
    check_positive_int("count", count)
    check_period("index", index, count)
    return Fragment(index, count, part)


def in_fragments(pull: Any, count: int, period: str = "period") -> list[Any]:
    """A pull cut into fragments that take turns: i of F at t ≡ (i + 1) τ / F (mod τ).

    Args:
      pull: the `Pull` of the whole part, at offset 0.
      count: how many fragments, F; 1: the pull itself.
      period: what the method calls τ.

    Raises:
      ValueError: fragments that do not divide the period, a delay of τ / F or more.

    >>> import lsgd_jax as lj
    >>> pull = lj.Pull(lj.average("local"), 1.0, every=8)
    >>> [(each.part.index, each.offset) for each in in_fragments(pull, 2)]
    [(0, 4), (1, 0)]
    """
    check_positive_int("fragments", count)
    if count == 1:
        return [pull]
    if pull.every % count:
        raise ValueError(
            f"`{period}` must be divisible by fragments={count}, got {period}={pull.every}"
        )
    turn = pull.every // count
    check_period("delay", pull.delay, turn)
    return [
        dataclasses.replace(
            pull, offset=(i + 1) * turn % pull.every, part=fragment(i, count, pull.part)
        )
        for i in range(count)
    ]


def check_part(part: Part | None) -> None:
    """Raises ValueError unless it is a function, paths, a mask or a `fragment`."""
    if part is None or callable(part) or isinstance(part, Fragment):
        return
    if _are_paths(part):
        return
    leaves = jax.tree.leaves(part)
    if not leaves or not all(isinstance(x, bool | np.bool_) for x in leaves):
        raise ValueError(
            "`part` must be a function from a path to bool, a list of paths such as "
            "['head'], a tree of bools like the parameters, or a fragment, got "
            f"part={part!r}"
        )


def select(part: Part | None, tree: Tree) -> Tree:
    """The tree with an empty node in place of every leaf outside of the part.

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
    check_part(part)
    if part is None:
        return tree
    if isinstance(part, Fragment):
        tree = select(part.part, tree)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [_name(path) for path, _ in leaves]
    if isinstance(part, Fragment):
        owners = _owners([leaf.size for _, leaf in leaves], part.count)
        taken = [owner == part.index for owner in owners]
    else:
        taken = list(map(_taker(part), paths))
    if paths and not any(taken):
        raise ValueError(
            f"`part` must hold at least one leaf, got {part=} for the leaves "
            f"{', '.join(map(repr, paths[:8]))}{', …' * (len(paths) > 8)}"
        )
    kept = [leaf if take else optax.MaskedNode() for (_, leaf), take in zip(leaves, taken)]
    return jax.tree.unflatten(treedef, kept)


def _taker(part: Any) -> Callable[[str], bool]:
    """Whether a path is in the part."""
    if callable(part):
        return lambda path: bool(part(path))
    if _are_paths(part):
        return lambda path: any(_is_under(path, start) for start in part)
    marks = [
        (_name(path), take) for path, take in jax.tree_util.tree_leaves_with_path(part)
    ]

    def marked(path: str) -> bool:
        found = [bool(take) for start, take in marks if _is_under(path, start)]
        if not found:
            raise ValueError(f"the mask `part` must have a bool for {path!r}, got {part!r}")
        return found[0]

    return marked


def _are_paths(part: Any) -> bool:
    is_list = isinstance(part, list | tuple)
    return is_list and bool(part) and all(isinstance(path, str) for path in part)


def _is_under(path: str, start: str) -> bool:
    return not start or path == start or path.startswith(f"{start}/")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _owners(sizes: list[int], count: int) -> list[int]:
    """The fragment of each leaf: the one in which its middle lies, by size."""
    if len(sizes) < count:
        raise ValueError(
            f"`fragments` must be at most the number of leaves ({len(sizes)}), got {count}"
        )
    ends = np.cumsum(sizes)
    owners = ((ends - np.array(sizes) / 2) * count / ends[-1]).astype(int)
    # No fragment may be empty: of the leaves left each later fragment needs one.
    for i in range(len(sizes)):
        first = owners[i - 1] if i else -1
        owners[i] = min(max(owners[i], 0), first + 1)
        owners[i] = max(owners[i], count - (len(sizes) - i), first, 0)
    return owners.tolist()
