"""resize: the state of some workers as that of others."""

from collections.abc import Sequence

import jax
import numpy as np

from lsgd_jax._types import Tree, is_shared


def resize(tree: Tree, sources: Sequence[int] | np.ndarray) -> Tree:
    r"""The state of other workers, each of which goes on from one of those before.

    .. math:: x_i \leftarrow x_{s(i)}

    for all that a worker has of its own; what stands in a `Shared` stays as it is. A node
    whose fields mean nothing to other workers (an index in the group, a push-sum weight)
    has a method ``resized()``, which is called once its rows are taken and returns the
    node as it is right for the new workers, or raises if there is no such thing.

    Args:
      tree: parameters or a state over W workers: host or device arrays, leaves [W, ...].
      sources: s, of each new worker the worker of before; any number, also repeated.

    Returns:
      The same tree with leaves [len(sources), ...].

    Raises:
      ValueError: messages that are under way to a worker, or a `Grouped`, whose groups are
        not known any more.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> state = {"x": jnp.array([10.0, 20.0]), "center": lj.Shared(jnp.float32(15))}
    >>> other = resize(state, sources=[1, 1, 0])
    >>> other["x"].tolist(), float(other["center"].value)
    ([20.0, 20.0, 10.0], 15.0)
    """
    rows = np.asarray(sources)
    taken = jax.tree.map(lambda x: x if is_shared(x) else x[rows], tree, is_leaf=is_shared)
    own = lambda node: hasattr(node, "resized")
    return jax.tree.map(lambda x: x.resized() if own(x) else x, taken, is_leaf=own)
