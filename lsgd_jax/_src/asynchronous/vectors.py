"""Parameters as one flat float32 vector, as they travel, and back."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.trees import Tree


@dataclasses.dataclass(frozen=True)
class Flat:
    """Conversion between vectors and trees of one structure.

    Args:
      treedef: the structure.
      leaves: shape and dtype of each leaf.

    >>> import jax.numpy as jnp
    >>> tree = {"a": jnp.zeros(2, jnp.bfloat16), "b": jnp.ones([1, 2])}
    >>> flat = flat_of(tree)
    >>> flat.vector(tree).tolist()
    [0.0, 0.0, 1.0, 1.0]
    >>> flat.tree(flat.vector(tree))["a"].dtype
    dtype(bfloat16)
    """

    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(math.prod(shape) for shape, _ in self.leaves)

    def vector(self, tree: Tree) -> np.ndarray:
        """Returns the tree as float32 [size], in the host's memory."""
        return np.asarray(_joined(tree))

    def wide(self, vector: Any) -> Tree:
        """Returns the tree with float32 leaves."""
        ends = np.cumsum([math.prod(shape) for shape, _ in self.leaves], dtype=int)
        slices = jnp.split(vector, ends[:-1])
        wide = [x.reshape(shape) for x, (shape, _) in zip(slices, self.leaves)]
        return jax.tree.unflatten(self.treedef, wide)

    @functools.partial(jax.jit, static_argnums=0)
    def tree(self, vector: Any) -> Tree:
        """Returns the tree with leaves of their own dtypes."""
        wide = jax.tree.leaves(self.wide(vector))
        narrow = [x.astype(dtype) for x, (_, dtype) in zip(wide, self.leaves)]
        return jax.tree.unflatten(self.treedef, narrow)


def flat_of(tree: Tree) -> Flat:
    """Returns the conversion for trees like this one."""
    leaves, treedef = jax.tree.flatten(tree)
    return Flat(treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves))


@jax.jit
def _joined(tree: Tree) -> Any:
    flat = [jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(tree)]
    return jnp.concatenate(flat) if flat else jnp.zeros([0])
