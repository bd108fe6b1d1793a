"""Convolutions without padding, whose gradient takes no product with zeros on CPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


LAYOUT = ("NHWC", "HWIO", "NHWC")


@jax.custom_vjp
def valid(x: Array, kernel: Array) -> Array:
    r"""The convolution of images where the kernel lies inside of them.

    .. math::
      y_{hw} = \sum_{r, s} x_{h + r, w + s} k_{rs}, \qquad
      \frac{\partial L}{\partial x_{hw}} = \sum_r \Big( \sum_s
      g_{h - r, w - s} k_{rs}^\top \Big)

    with k the kernel, r, s its rows and columns, and g the gradient of y. As a convolution,
    the gradient of x is one of g with a border of zeros on all sides: for a 5 x 5 kernel on
    12 x 12 images 2.25 times the products there are. Here, on CPUs, the sum over s is a
    convolution with zeros on two sides, and that over r one of images moved down by r.

    Args:
      x: images [B, H, W, C].
      kernel: [R, S, C, D].

    Returns:
      [B, H - R + 1, W - S + 1, D].

    >>> valid(jnp.ones((1, 3, 3, 1)), jnp.ones((2, 2, 1, 1))).shape
    (1, 2, 2, 1)
    """
    return _convolution(x, kernel)


def _convolution(x: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=LAYOUT)


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _convolution(x, kernel), (x, kernel)


def _backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = saved
    _, of_kernel = jax.vjp(lambda kernel: _convolution(x, kernel), kernel)

    def by_convolution(g, kernel):
        return jax.linear_transpose(lambda x: _convolution(x, kernel), x)(g)[0]

    of_x = lax.platform_dependent(g, kernel, cpu=_by_rows, default=by_convolution)
    return of_x, *of_kernel(g)


def _by_rows(g: Array, kernel: Array) -> Array:
    """The gradient of x from that of y."""
    rows, columns, inputs, outputs = kernel.shape
    flipped = kernel[:, ::-1].transpose(1, 3, 0, 2)  # [S, D, R, C]
    flipped = flipped.reshape(1, columns, outputs, rows * inputs)
    border = ((0, 0), (columns - 1, columns - 1))
    sums = lax.conv_general_dilated(g, flipped, (1, 1), border, dimension_numbers=LAYOUT)
    batch, height, width = sums.shape[:3]
    sums = sums.reshape(batch, height, width, rows, inputs)
    down = lambda r: ((0, 0), (r, rows - 1 - r), (0, 0), (0, 0))
    moved = (jnp.pad(sums[:, :, :, r], down(r)) for r in range(rows))
    return functools.reduce(jnp.add, moved)


valid.defvjp(_forward, _backward)


def conv_general_dilated(
    x: Array, kernel: Array, strides: Any, padding: Any, **settings: Any
) -> Array:
    """`valid`, for `nn.Conv` without padding and whose other settings are the defaults."""
    del strides, padding, settings
    return valid(x, kernel)
