"""Parts of the parameters: what a pull takes of them, by path or as one of n fragments."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from lsgd_jax._src.checks import check_period, check_positive_int
from lsgd_jax._src.trees import Tree


class Fragment(NamedTuple):
    """One of `count` runs of neighboring leaves of about the same size."""

    index: int
    count: int


Part = Fragment | Callable[[str], bool]


def fragment(index: int, count: int) -> Fragment:
    """The `index`-th of `count` runs of neighboring leaves of about the same size.

    Leaves are taken in the order of `jax.tree.leaves`; every run has at least one.

    Raises:
      ValueError: a count below 1, an index outside 0..count-1; in `init`, more fragments
        than leaves.

    >>> import jax
    >>> import numpy as np
    >>> import lsgd_jax as lj
    >>> tree = {"a": np.zeros(3), "b": np.zeros(1), "c": np.zeros(2)}
    >>> jax.tree.map(np.shape, select(lj.fragment(1, 2), tree))
    {'a': MaskedNode(), 'b': (1,), 'c': (2,)}
    """
    check_positive_int("count", count)
    check_period("index", index, count)
    return Fragment(index, count)


def in_fragments(pull: Any, count: int, period: str = "period") -> list[Any]:
    """A pull cut into fragments that take turns: i of F at t ≡ (i + 1) τ / F (mod τ).

    Args:
      pull: the `Pull` of all parameters, at offset 0.
      count: how many fragments, F; 1: the pull itself.
      period: what the method calls τ.

    Raises:
      ValueError: fragments that do not divide the period, a delay of τ / F or more.

    >>> import lsgd_jax as lj
    >>> pull = lj.Pull(lj.average("local"), 1.0, every=8)
    >>> [(each.part, each.offset) for each in in_fragments(pull, 2)]
    [(Fragment(index=0, count=2), 4), (Fragment(index=1, count=2), 0)]
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
            pull, offset=(i + 1) * turn % pull.every, part=fragment(i, count)
        )
        for i in range(count)
    ]


def select(part: Part | None, tree: Tree) -> Tree:
    """The tree with an empty node in place of every leaf outside of the part."""
    if part is None:
        return tree
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if isinstance(part, Fragment):
        owners = _owners([leaf.size for _, leaf in leaves], part.count)
        taken = [owner == part.index for owner in owners]
    else:
        name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
        taken = [bool(part(name(path))) for path, _ in leaves]
    kept = [leaf if take else optax.MaskedNode() for (_, leaf), take in zip(leaves, taken)]
    return jax.tree.unflatten(treedef, kept)


def _owners(sizes: list[int], count: int) -> list[int]:
    """Of each leaf its fragment: that in which the middle of the leaf lies, by size."""
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
