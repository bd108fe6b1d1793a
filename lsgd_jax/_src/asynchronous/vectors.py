"""Parameters as one flat float32 vector, as they travel, and back."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.trees import Tree, floats


@dataclasses.dataclass(frozen=True)
class Flat:
    """Conversion between vectors and trees of one structure.

    Leaves that do not hold floats are not in the vector, see `trees.floats`.

    Args:
      treedef: the structure.
      shapes: shape of each leaf that holds floats.

    >>> tree = {"a": jnp.zeros(2, jnp.bfloat16), "b": jnp.ones([1, 2]), "n": jnp.int32(3)}
    >>> flat = flat_of(tree)
    >>> flat.vector(tree).tolist()
    [0.0, 0.0, 1.0, 1.0]
    >>> flat.tree(flat.vector(tree))["b"].shape
    (1, 2)
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(map(math.prod, self.shapes))

    def vector(self, tree: Tree) -> np.ndarray:
        """Returns the tree as float32 [size], in the host's memory."""
        return np.asarray(_joined(floats(tree)))

    def tree(self, vector: Any) -> Tree:
        """Returns the tree with float32 leaves."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes], dtype=int)
        slices = jnp.split(vector, ends[:-1])
        leaves = [x.reshape(shape) for x, shape in zip(slices, self.shapes)]
        return jax.tree.unflatten(self.treedef, leaves)


def flat_of(tree: Tree) -> Flat:
    """Returns the conversion for trees like this one."""
    leaves, treedef = jax.tree.flatten(floats(tree))
    return Flat(treedef, tuple(jnp.shape(x) for x in leaves))


@jax.jit
def _joined(tree: Tree) -> Any:
    flat = [jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(tree)]
    return jnp.concatenate(flat) if flat else jnp.zeros([0])
