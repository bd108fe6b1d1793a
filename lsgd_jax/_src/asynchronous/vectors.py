"""Parameters as one flat float32 vector, as they travel, and back."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.trees import Tree


class Flat:
    """How trees of one structure become vectors; compiled once.

    Args:
      treedef: the structure.
      shapes: of each leaf its shape and dtype.

    >>> import jax.numpy as jnp
    >>> tree = {"a": jnp.zeros(2, jnp.bfloat16), "b": jnp.ones([1, 2])}
    >>> flat = flat_of(tree)
    >>> flat.vector(tree).tolist()
    [0.0, 0.0, 1.0, 1.0]
    >>> flat.tree(flat.vector(tree))["a"].dtype
    dtype(bfloat16)
    """

    def __init__(self, treedef: Any, shapes: tuple[tuple[tuple[int, ...], Any], ...]):
        sizes = [int(np.prod(shape)) for shape, _ in shapes]
        bounds = np.concatenate([[0], np.cumsum(sizes, dtype=int)])
        self.size = int(bounds[-1])

        def join(tree: Tree) -> Any:
            flat = [jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(tree)]
            return jnp.concatenate(flat) if flat else jnp.zeros([0])

        def cut(vector: Any, narrow: bool = False) -> Tree:
            parts = [
                vector[a:b].reshape(shape).astype(dtype if narrow else jnp.float32)
                for a, b, (shape, dtype) in zip(bounds, bounds[1:], shapes)
            ]
            return jax.tree.unflatten(treedef, parts)

        self._join: Callable[[Tree], Any] = jax.jit(join)
        self.tree: Callable[[Any], Tree] = jax.jit(lambda vector: cut(vector, narrow=True))
        self.wide: Callable[[Any], Tree] = cut

    def vector(self, tree: Tree) -> np.ndarray:
        """The tree as float32 [size], in the host's memory."""
        return np.asarray(self._join(tree))


def flat_of(tree: Tree) -> Flat:
    """How trees like this one become vectors: the same one for all of them."""
    leaves, treedef = jax.tree.flatten(tree)
    return _flat(treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves))


_flat = functools.lru_cache(maxsize=256)(Flat)
