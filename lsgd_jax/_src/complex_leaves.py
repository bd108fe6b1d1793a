"""Complex leaves as two real ones, which is how they are exchanged.

Sums, means and pulls of complex numbers act on real and imaginary parts alone. So does
every rule here that compares leaves by their norm, because |z|² = Re² + Im². A rule and a
wire format therefore see a pair of real leaves in place of a complex one, and a rule that
works coordinate by coordinate (a median) takes the two parts as two coordinates.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


Tree = Any


class Complex(NamedTuple):
    """A complex leaf as two real ones.

    Attributes:
      complex_real: the real part.
      complex_imag: the imaginary part.
    """

    complex_real: Any
    complex_imag: Any


def is_pair(node: Any) -> bool:
    """Whether a node stands for a complex leaf: the `is_leaf` of tree maps."""
    return isinstance(node, Complex)


def is_complex(x: Any) -> bool:
    """Whether a leaf holds complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def pair(x: Any) -> Complex:
    """The two parts of an array, in its memory."""
    if x.dtype == jax.dtypes.float0:  # the gradient of a leaf that has none
        zeros = jnp.zeros(x.shape)
        return Complex(zeros, zeros)
    return Complex(x.real, x.imag)


def in_pairs(tree: Tree) -> Tree:
    """The tree with a pair of real leaves in place of every complex leaf.

    >>> import numpy as np
    >>> jax.tree.leaves(in_pairs({"z": np.complex64(1 + 2j)}))
    [np.float32(1.0), np.float32(2.0)]
    """
    return jax.tree.map(lambda x: pair(x) if is_complex(x) else x, tree)


def joined(tree: Tree) -> Tree:
    """The inverse of `in_pairs`."""

    def join(node):
        return lax.complex(*node) if is_pair(node) else node

    return jax.tree.map(join, tree, is_leaf=is_pair)


def without_parts(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path of the complex leaf of which the path leads to a part.

    Parts of a model are chosen by the paths of its own leaves, and leaves are sharded by
    them.
    """
    name = getattr(path[-1], "name", None) if path else None
    return path[:-1] if name in Complex._fields else path
