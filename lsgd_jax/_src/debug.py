"""What `Workers(debug=True)` looks at after every step."""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from lsgd_jax._src.trees import Tree


def check_not_misplaced(tree: Tree, read_all: Callable[[Tree], Tree]) -> None:
    """Raises ValueError if a state of an exchange in the tree counts misplaced parameters.

    Args:
      tree: what a mapped function returned; its nodes with a field `misplaced` (int32
        [W]) are looked at.
      read_all: copies such leaves to the host, in every process.
    """
    found = list(_misplaced(tree))
    if any(isinstance(x, jax.core.Tracer) for x in found):
        return  # the call is itself traced: there is nothing to look at yet
    counts = read_all(found)
    workers = sorted({int(i) for count in counts for i in np.flatnonzero(count > 0)})
    if workers:
        raise ValueError(
            "the parameters are not where the exchange left them at the last step: an "
            "exchange must stand last in its chain (behind clipping, scaling and the base "
            "optimizer), an aggregation of gradients first; seen on "
            f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
        )


def _misplaced(tree: Tree) -> Iterator[jax.Array]:
    counts = lambda node: hasattr(node, "misplaced")
    for node in jax.tree.leaves(tree, is_leaf=counts):
        if counts(node) and node.misplaced is not None:
            yield node.misplaced
