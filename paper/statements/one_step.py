r"""On a strongly convex f the leader's advantage adds to the descent of an SGD step.

For m-strongly convex f with M-Lipschitz gradient (κ = M/m), a leader z with f(z) ≤ f(x)
and x₊ = x − η(g + λ(x − z)), g an unbiased gradient of variance σ²:

.. math::
  E f(x_+) - f^* \le (1 - m\eta)(f(x) - f^*) - \eta\lambda(f(x) - f(z))
    + \tfrac12 \eta^2 M \sigma^2

if η ≤ 1/(2M) and ηλ ≤ 1/(2κ). (Smoothness bounds f(x₊). Strong convexity gives
∇f·(x − z) ≥ f(x) − f(z) + (m/2)‖x − z‖², whose last term covers M(ηλ)²‖x − z‖².)

Checked on random f(x) = ½xᵀHx + s Σ_k log cosh x_k in five dimensions with κ up to 100.
The noise is ±σv along a unit vector v, so that the expectation is a mean of two steps.

Paper: theorem on the one-step descent of LSGD.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paper.descent import descent, lgd
from paper.statements.claim import Claim, Findings


class Cases(NamedTuple):
    """Random functions, positions and settings: float64 arrays [cases, ...].

    Attributes:
      hessian: H [d, d].
      bend: s. The minimum of f is 0, at 0.
      convexity: m, the smallest eigenvalue of H.
      smoothness: M, the sum of its largest eigenvalue and s.
      x, z: the positions of the worker and of the leader, [d], with f(z) ≤ f(x).
      noise: σv [d].
      rate: η; pull: λ.
    """

    hessian: np.ndarray
    bend: np.ndarray
    convexity: np.ndarray
    smoothness: np.ndarray
    x: np.ndarray
    z: np.ndarray
    noise: np.ndarray
    rate: np.ndarray
    pull: np.ndarray


def height(x: jax.Array, hessian: jax.Array, bend: jax.Array) -> jax.Array:
    """f(x) = ½xᵀHx + s Σ log cosh x_k."""
    log_cosh = jnp.logaddexp(x, -x) - jnp.log(2.0)
    return x @ hessian @ x / 2 + bend * log_cosh.sum()


heights = jax.jit(jax.vmap(height))


def draw_cases(rng: np.random.Generator, count: int, largest: float = 1.0) -> Cases:
    """Draws random cases with steps up to `largest` times the limits of the statement."""
    dimension = 5
    rotation = np.linalg.qr(rng.standard_normal((count, dimension, dimension)))[0]
    spectrum = 10 ** rng.uniform(-1, 1, (count, dimension))
    hessian = (rotation * spectrum[:, None]) @ rotation.swapaxes(1, 2)
    bend = rng.choice([0.0, 1.0], count) * rng.uniform(0, 10, count)
    least = spectrum.min(axis=1)
    greatest = spectrum.max(axis=1) + bend

    scale = 10 ** rng.uniform(-1, 1, (count, 1))
    x = scale * rng.standard_normal((count, dimension))
    z = x * rng.uniform(-1, 1, (count, 1)) + scale * rng.standard_normal(x.shape)
    lower = np.asarray(heights(z, hessian, bend) <= heights(x, hessian, bend))[:, None]
    x, z = np.where(lower, x, z), np.where(lower, z, x)

    # Half of the noise lies along the steepest curvature, where the bound is tightest.
    steepest = np.take_along_axis(rotation, spectrum.argmax(axis=1)[:, None, None], axis=2)
    anywhere = rng.standard_normal((count, dimension))
    along = np.where(rng.random((count, 1)) < 0.5, steepest[..., 0], anywhere)
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    noise = 10 ** rng.uniform(-2, 2, (count, 1)) * along

    # A third each: at the limit of η, at the limit of ηλ, anywhere below both.
    kind = rng.integers(0, 3, count)
    rate = np.where(kind == 0, 1.0, 10 ** rng.uniform(-3, 0, count)) / (2 * greatest)
    fraction = np.where(kind == 1, 1.0, 10 ** rng.uniform(-3, 0, count))
    pull = fraction * least / (2 * greatest) / rate
    rate = largest * rate
    pull = pull * largest
    return Cases(hessian, bend, least, greatest, x, z, noise, rate, pull)


def step_heights(cases: Cases) -> np.ndarray:
    """Returns E f(x₊) of the library's step from x with a leader at z, over both noises."""

    def noisy(x, k, hessian, bend, rate, pull, noise):
        value, grad = jax.value_and_grad(height)(x, hessian, bend)
        return value, grad + noise

    def method(hessian, bend, rate, pull, noise):
        return lgd(rate, lambda _: rate * pull)

    starts = np.stack([cases.x, cases.x, cases.z], axis=1)
    noises = np.stack([cases.noise, -cases.noise, 0 * cases.noise], axis=1)
    shared = cases.hessian, cases.bend, cases.rate, cases.pull
    _, ends = descent(method, noisy)(starts, shared, (noises,))
    after = [heights(ends[:, i], cases.hessian, cases.bend) for i in (0, 1)]
    return np.mean(after, axis=0)


def bounds(cases: Cases) -> np.ndarray:
    """Returns the bound on E f(x₊), one value per case."""
    at_x = np.asarray(heights(cases.x, cases.hessian, cases.bend))
    at_z = np.asarray(heights(cases.z, cases.hessian, cases.bend))
    eta = cases.rate
    variance = np.square(cases.noise).sum(axis=1)
    return (
        (1 - cases.convexity * eta) * at_x
        - eta * cases.pull * (at_x - at_z)
        + eta**2 * cases.smoothness * variance / 2
    )


def check(seed: int = 0, cases: int = 3000, largest: float = 1.0) -> Findings:
    """Compares the step with the bound in random cases."""
    drawn = draw_cases(np.random.default_rng(seed), cases, largest)
    expected = step_heights(drawn)
    bound = bounds(drawn)
    before = np.asarray(heights(drawn.x, drawn.hessian, drawn.bend))
    scale = before + np.square(drawn.noise).sum(axis=1) * drawn.rate
    excess = (expected - bound) / scale
    claim = Claim(
        "E f(x₊) − f* ≤ (1 − mη)(f(x) − f*) − ηλ(f(x) − f(z)) + ½η²Mσ²",
        f"left − right, of f(x) − f* + ησ², worst of {cases} random cases",
        float(excess.max()),
        tolerance=1e-14,
    )
    return Findings([claim])
