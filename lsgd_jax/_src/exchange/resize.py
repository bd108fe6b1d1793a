"""resize: continue the state of some workers with another number of workers."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lsgd_jax._src.shared import Shared
from lsgd_jax._src.trees import Tree


def resize(tree: Tree, sources: Sequence[int] | np.ndarray) -> Tree:
    r"""Returns the state of new workers, each of which continues one of the old workers.

    .. math:: x_i \leftarrow x_{s(i)}

    for every per-worker leaf; a `Shared` stays as it is. A node whose fields mean nothing
    to other workers (an index in the group, a push-sum weight) has a method
    ``__lsgd_resized__()``. It is called after the rows are taken, and returns the node for
    the new workers or raises.

    Args:
      tree: parameters or a state over W workers: host or device arrays, leaves [W, ...].
      sources: s(i), the old worker that each new worker continues, in 0..W-1. At least one;
        repetitions are allowed.

    Returns:
      The same tree with leaves [len(sources), ...].

    Raises:
      ValueError: sources that are empty, not integers or not in 0..W-1; messages in flight
        to a worker; a `Shared` of some workers only, because the new workers do not
        determine its groups.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> state = {"x": jnp.array([10.0, 20.0]), "center": lj.Shared(jnp.float32(15))}
    >>> other = lj.resize(state, sources=[1, 1, 0])
    >>> other["x"].tolist(), float(other["center"].value)
    ([20.0, 20.0, 10.0], 15.0)
    """
    rows = np.asarray(sources)
    if rows.ndim != 1 or not rows.size or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(
            f"`sources` must be a list of at least one worker index, got sources={sources}"
        )

    def take(x: Any) -> Any:
        if isinstance(x, Shared) and x.axes is not None:
            raise ValueError(
                "the workers must stay the same if a state is shared by groups of workers, "
                f"got a `Shared` over {' and '.join(map(repr, x.axes))} only"
            )
        if isinstance(x, Shared):
            return x
        # Indexing a jax array would clamp an index that is too large.
        if rows.min() < 0 or rows.max() >= len(x):
            raise ValueError(
                f"`sources` must be in 0..{len(x) - 1} for {len(x)} workers, "
                f"got sources={rows.tolist()}"
            )
        return x[rows]

    taken = jax.tree.map(take, tree, is_leaf=lambda node: isinstance(node, Shared))
    return _resized(taken)


def _resized(tree: Tree) -> Tree:
    """Calls the hook of every node that has one, then those of the nodes inside it."""
    if _has_hook(tree):
        tree = tree.__lsgd_resized__()

    def is_within(node: Any) -> bool:
        return node is not tree and _has_hook(node)

    def resized(node: Any) -> Any:
        return _resized(node) if _has_hook(node) else node

    # A hook sees the new rows of its own node, so nodes inside it come after it.
    return jax.tree.map(resized, tree, is_leaf=is_within)


def _has_hook(node: Any) -> bool:
    return hasattr(type(node), "__lsgd_resized__")
