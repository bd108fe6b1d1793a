"""Norms of numbers of any size: sums of squares that neither overflow nor vanish.

The squares of float32 are finite up to 1.8e19 only. So large, medium and small numbers are
summed apart, scaled by powers of two. Such sums add up like any others.

Reference: Blue, A Portable Fortran Program to Find the Euclidean Norm of a Vector, ACM
Transactions on Mathematical Software 4, 1978.
"""

import jax.numpy as jnp
from jax import Array
from jax.lax import optimization_barrier

from lsgd_jax._src.trees import widened


def squares(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Sums of squares over some axes, of large, medium and small numbers: [3, ...].

    Args:
      x: real numbers.
      axis: the axes of the sum. Defaults to all.

    Returns:
      In float32 at least. `norm` reads it, and the sum of several.
    """
    x = jnp.abs(widened(x))
    edge, scale = _limits(x.dtype)
    is_large = x > edge
    is_small = x < 1 / edge
    apart = (
        jnp.where(is_large, x / scale, 0),
        jnp.where(is_large | is_small, 0, x),
        jnp.where(is_small, x * scale, 0),
    )
    return jnp.stack([jnp.square(each).sum(axis=axis) for each in apart])


def norm(squares: Array) -> Array:
    """The square root of sums [3, ...] that `squares` has made.

    >>> f"{norm(squares(jnp.array([3e30, 4e30]))):.4g}"
    '5e+30'
    """
    _, scale = _limits(squares.dtype)
    large, medium, small = squares

    def beside_a_larger_class(squares):
        # XLA would square the scale, which overflows, and so lose these numbers.
        return jnp.square(optimization_barrier(jnp.sqrt(squares) / scale))

    # The next smaller class counts, the one below it does not.
    of_large = jnp.sqrt(large + beside_a_larger_class(medium)) * scale
    of_medium = jnp.sqrt(medium + beside_a_larger_class(small))
    of_small = jnp.sqrt(small) / scale
    return jnp.where(large > 0, of_large, jnp.where(medium == 0, of_small, of_medium))


def _limits(dtype) -> tuple[float, float]:
    """The least large number and its factor, 2⁴⁰ and 2⁸⁴ in float32."""
    largest = jnp.finfo(dtype).maxexp
    return 2.0 ** (largest * 5 // 16), 2.0 ** (largest * 21 // 32)
