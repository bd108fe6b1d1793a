"""Two layers whose gradients XLA computes faster on CPUs.

Batch normalization computes its sums as products with a vector of ones. The gradient of a
convolution without padding avoids products with zeros.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax


EPSILON = 1e-5
LAYOUT = ("NHWC", "HWIO", "NHWC")


@jax.custom_vjp
def normalized(x: Array, scale: Array, bias: Array) -> tuple[Array, Array, Array]:
    r"""Normalizes each channel over a batch, then applies its scale and bias.

    .. math::
      \hat x_i = r (x_i - \mu), \quad
      r = \frac{1}{\sqrt{\sigma^2 + 10^{-5}}}, \quad
      y_i = \gamma \hat x_i + \beta, \qquad
      \frac{\partial L}{\partial x_i} = \gamma r \Big( g_i - \frac{1}{n} \sum_j g_j
      - \frac{\hat x_i}{n} \sum_j g_j \hat x_j \Big)

    with μ and σ² the mean and the variance of x over the n pixels of all images, γ the
    scale, β the bias, and g the gradient of y. The variance is the mean of the squares
    minus the square of the mean. On CPUs XLA sums over rows slowly but multiplies fast:
    with the gradient of flax's layer, a step of ResNet20 takes 1.1 to 1.4 times as long.

    Args:
      x: [..., C].
      scale: [1, …, 1, C], with as many axes as x.
      bias: like the scale.

    Returns:
      y, like x; μ and σ², like the scale, at least float32, without gradients.

    Source: Ioffe and Szegedy, ICML 2015, Algorithm 1.

    >>> y, mean, variance = normalized(jnp.array([[1.0], [3.0]]), *jnp.ones([2, 1, 1]))
    >>> mean.tolist(), variance.tolist(), y.round(3).tolist()
    ([[2.0]], [[1.0]], [[0.0], [2.0]])
    """
    return _norm_forward(x, scale, bias)[0]


def _norm_forward(x: Array, scale: Array, bias: Array):
    n = x.size // x.shape[-1]
    mean = _total(x) / n
    variance = jnp.maximum(_total(jnp.square(x)) / n - jnp.square(mean), 0)
    y = affine(x, mean, variance, scale, bias)
    return (y, mean, variance), (x, mean, variance, scale)


def _norm_backward(saved: tuple[Array, ...], gradients: tuple[Array, ...]):
    x, mean, variance, scale = saved
    g, *_ = gradients
    n = x.size // x.shape[-1]
    r = lax.rsqrt(variance + EPSILON)
    of_bias = _total(g)
    of_scale = r * (_total(g * x) - mean * of_bias)
    of_x = scale * r * (g - (of_bias + r * (x - mean) * of_scale) / n)
    return of_x.astype(x.dtype), of_scale.astype(scale.dtype), of_bias.astype(scale.dtype)


normalized.defvjp(_norm_forward, _norm_backward)


def affine(x: Array, mean: Array, variance: Array, scale: Array, bias: Array) -> Array:
    """γ r (x - μ) + β."""
    slope = scale * lax.rsqrt(variance + EPSILON)
    return x * slope + (bias - mean * slope)


def _total(x: Array) -> Array:
    """The sum over all axes except the last, [1, …, 1, C], in at least float32."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows.astype(jnp.promote_types(x.dtype, jnp.float32))

    def by_product(rows):
        return jnp.ones(len(rows), rows.dtype) @ rows

    total = lax.platform_dependent(rows, cpu=by_product, default=lambda rows: rows.sum(0))
    return _beside(total, x)


def _beside(values: Array, x: Array) -> Array:
    """Reshapes values of channels [C] to [1, …, 1, C], with as many axes as x."""
    return jnp.expand_dims(values, range(x.ndim - 1))


class BatchNorm(nn.Module):
    """`flax.linen.BatchNorm` over the last axis, with the same variables.

    Running statistics are updated as r ← m r + (1 - m) b, where b is that of the batch.

    Attributes:
      use_running_average: whether running statistics normalize x, as in tests.
      momentum: m.
    """

    use_running_average: bool
    momentum: float = 0.9

    @nn.compact
    def __call__(self, x: Array) -> Array:
        channels = x.shape[-1:]
        scale = _beside(self.param("scale", nn.initializers.ones, channels), x)
        bias = _beside(self.param("bias", nn.initializers.zeros, channels), x)
        mean = self.variable("batch_stats", "mean", jnp.zeros, channels)
        variance = self.variable("batch_stats", "var", jnp.ones, channels)
        if self.use_running_average:
            kept = _beside(mean.value, x), _beside(variance.value, x)
            return affine(x, *kept, scale, bias)
        y, *found = normalized(x, scale, bias)
        if not self.is_initializing():
            m = self.momentum
            for running, batch in zip((mean, variance), found):
                running.value = m * running.value + (1 - m) * batch.reshape(channels)
        return y


@jax.custom_vjp
def valid(x: Array, kernel: Array) -> Array:
    r"""The convolution of images without padding.

    .. math::
      y_{hw} = \sum_{r, s} x_{h + r, w + s} k_{rs}, \qquad
      \frac{\partial L}{\partial x_{hw}} = \sum_r \Big( \sum_s
      g_{h - r, w - s} k_{rs}^\top \Big)

    with k the kernel, r, s its rows and columns, and g the gradient of y. Computed as one
    convolution, the gradient of x pads g with zeros on all sides, which needs 2.25 times
    the products for a 5 x 5 kernel on 12 x 12 images. On CPUs, the sum over s is computed
    here as a convolution padded on two sides, and the sum over r adds shifted images.

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


def _convolution_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _convolution(x, kernel), (x, kernel)


def _convolution_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = saved
    _, of_kernel = jax.vjp(lambda kernel: _convolution(x, kernel), kernel)

    def by_convolution(g, kernel):
        return jax.linear_transpose(lambda x: _convolution(x, kernel), x)(g)[0]

    of_x = lax.platform_dependent(g, kernel, cpu=_by_rows, default=by_convolution)
    return of_x, *of_kernel(g)


def _by_rows(g: Array, kernel: Array) -> Array:
    """The gradient of x from the gradient of y."""
    rows, columns, inputs, outputs = kernel.shape
    flipped = kernel[:, ::-1].transpose(1, 3, 0, 2)  # [S, D, R, C]
    flipped = flipped.reshape(1, columns, outputs, rows * inputs)
    border = ((0, 0), (columns - 1, columns - 1))
    sums = lax.conv_general_dilated(g, flipped, (1, 1), border, dimension_numbers=LAYOUT)
    batch, height, width = sums.shape[:3]
    sums = sums.reshape(batch, height, width, rows, inputs)

    def down(r):
        return ((0, 0), (r, rows - 1 - r), (0, 0), (0, 0))

    moved = (jnp.pad(sums[:, :, :, r], down(r)) for r in range(rows))
    return functools.reduce(jnp.add, moved)


valid.defvjp(_convolution_forward, _convolution_backward)


def conv_general_dilated(
    x: Array, kernel: Array, strides: Any, padding: Any, **settings: Any
) -> Array:
    """`valid` for an `nn.Conv` without padding and with default settings otherwise."""
    del strides, padding, settings
    return valid(x, kernel)
