"""HeLoCo: stale pseudo-gradients are turned towards the outer momentum, tensor by tensor.

HeLoCo, 2026, arXiv:2606.00271. Written from a write-up of the paper, with the constants of
a port that quotes its table 3; the paper itself was not read.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import Array


def heloco_correct(
    delta: Array,
    m: Array,
    c_ok: float = 0.2,
    k_s: float = 0.5,
    k_d: float = 1.0,
    beta_max: float = 0.5,
    kappa: float = 3.0,
    eps: float = 1e-8,
) -> Array:
    r"""A pseudo-gradient after HeLoCo's correction, for one tensor.

    .. math::
      \hat u = \frac{\Delta}{|\Delta|}, \qquad \hat v = \frac{m}{|m|}, \qquad
      c = \hat u \cdot \hat v, \qquad
      \text{conf} = \frac{|\Delta|}{|\Delta| + \kappa |m| + \epsilon}

    .. math::
      \hat\Delta = \begin{cases}
        \Delta & c \ge c_\text{ok} \\
        \Delta - b \, c \, |\Delta| \, \hat v, \;
          b = \min(-k_s \, c \, \text{conf}, b_\text{max}) & c < 0 \\
        |\Delta| \, \tilde u / |\tilde u|, \; \tilde u = (1 - l) \hat u + l \hat v, \;
          l = \min(k_d (1 - c) \, \text{conf}, 1) & \text{otherwise}
      \end{cases}

    Args:
      delta: Δ, the pseudo-gradient of a tensor; any shape.
      m: the outer momentum of that tensor, like Δ.
      c_ok: the cosine from which on nothing is corrected.
      k_s: how much is taken from a Δ that points backwards.
      k_d: how far a Δ that points aside is turned.
      beta_max: the largest b.
      kappa: how much the momentum's norm lowers the confidence in Δ.
      eps: Δ is not corrected if its norm or that of m is below.

    Returns:
      The corrected Δ, in the dtype of `delta`.

    >>> aside = heloco_correct(jnp.array([0.0, 1.0]), jnp.array([1.0, 0.0]))
    >>> aside.round(3).tolist()
    [0.316, 0.949]
    """
    size, of_m = jnp.linalg.norm(delta), jnp.linalg.norm(m)
    is_large = (size >= eps) & (of_m >= eps)
    u, v = delta / jnp.where(is_large, size, 1), m / jnp.where(is_large, of_m, 1)
    c = jnp.sum(u * v)
    confidence = size / (size + kappa * of_m + eps)
    b = jnp.minimum(-k_s * c * confidence, beta_max)
    turn = jnp.minimum(k_d * (1 - c) * confidence, 1)
    mixed = (1 - turn) * u + turn * v
    aside = size * mixed / jnp.maximum(jnp.linalg.norm(mixed), eps)
    turned = jnp.where(c < 0, delta - b * c * size * v, aside)
    return jnp.where(is_large & (c < c_ok), turned, delta).astype(delta.dtype)


def heloco_step(
    anchor: Array,
    m: Array,
    delta: Array,
    rate: float | Array,
    momentum: float | Array,
    rho: float | Array = 1.0,
) -> tuple[Array, Array]:
    r"""The outer step after the correction, whose momentum is an average.

    .. math::
      G = \rho \hat\Delta, \qquad m \leftarrow \mu m + (1 - \mu) G, \qquad
      a \leftarrow a - \eta (G + \mu m)

    Args:
      anchor, m: a and m, of one shape.
      delta: the corrected pseudo-gradient.
      rate, momentum: η and μ.
      rho: ρ, the weight of the pseudo-gradient.

    Returns:
      (anchor, m) after the step.

    >>> a, m = heloco_step(jnp.zeros(1), jnp.zeros(1), jnp.ones(1), rate=1.0, momentum=0.5)
    >>> a.tolist(), m.tolist()
    ([-1.25], [0.5])
    """
    given = rho * delta
    renewed = momentum * m + (1 - momentum) * given
    return anchor - rate * (given + momentum * renewed), renewed


@functools.partial(jax.jit, static_argnames="sizes")
def corrected(outer: Array, gradient: Array, sizes: tuple[int, ...]) -> Array:
    """A flat pseudo-gradient with each of its tensors corrected.

    Args:
      outer: anchor and momentum, concatenated: float32 [2 n].
      gradient: float32 [n].
      sizes: the number of elements of each tensor, n in all.
    """
    ends = list(itertools.accumulate(sizes))[:-1]
    tensors = zip(jnp.split(gradient, ends), jnp.split(outer[gradient.size :], ends))
    each = [heloco_correct(delta, m) for delta, m in tensors]
    return jnp.concatenate(each) if each else gradient


@jax.jit
def moved(outer: Array, gradient: Array, rate: Array, momentum: Array) -> Array:
    """Anchor and momentum after `heloco_step`, concatenated: float32 [2 n]."""
    anchor, m = jnp.split(outer, 2)
    return jnp.concatenate(heloco_step(anchor, m, gradient, rate, momentum))
