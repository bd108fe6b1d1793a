r"""With a leader elected by noisy losses LSGD stays near the minimum, or converges to it.

For p workers, gradients of variance σ², losses of variance σ_f², constant η and λ within
the limits of `one_step`, and m-strongly convex f with condition number κ,

.. math::
  \limsup_k E f(x_k) - f^* \le \tfrac12 \eta\kappa\sigma^2
    + \frac4m \lambda \sqrt p \, \sigma_f .

With decreasing steps LSGD converges at the rate O(1/k). For K = k + 4κ, η_k = 2/(mK), which
is at most 1/(2M), and λ_k = l/K, this bound and that of `one_step` give by induction

.. math::
  E f(x_k) - f^* \le \frac vK, \qquad
  v = \max\left(4\kappa (f(x_0) - f^*), \;
    \frac{2 M \sigma^2}{m^2} + \frac{8 l \sqrt p \, \sigma_f}{m}\right).

Checked on f(x) = ½xᵀHx in ten dimensions with eigenvalues from 1 to 10, by the mean over
many independent groups of four workers: its largest tail value for constant steps, every
value for decreasing ones.

Paper: theorem on stochastic leader selection; corollary on decreasing learning rates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paper.descent import descent, lgd
from paper.statements.claim import Claim, Findings


WORKERS = 4  # p
CURVATURE = np.linspace(1.0, 10.0, 10)  # H, a diagonal
CONVEXITY, SMOOTHNESS = CURVATURE.min(), CURVATURE.max()  # m, M
CONDITION = SMOOTHNESS / CONVEXITY  # κ

# With decreasing steps: σ, l, σ_f and the distance of the start.
SIGMA = 3.0
PULL = 20.0
LOSS_NOISES = (0.0, 1.0)
DISTANCE = 0.3


class DescentSettings(NamedTuple):
    """The settings of an experiment: floats, or arrays with a value per group.

    Attributes:
      rate: η, or a function of the step, counted from 0.
      pull: λ, likewise.
      gradient_noise: σ, the root of the gradient's variance E‖g − ∇f‖².
      loss_noise: σ_f.
    """

    rate: Any
    pull: Any
    gradient_noise: Any
    loss_noise: Any


def descend(
    setting_of: Callable[[Any], DescentSettings],
    rows: np.ndarray,
    steps: int,
    seed: int,
    distance: float = 1.0,
) -> np.ndarray:
    """Returns f(x_k) − f*, the mean over the workers of a group: float64 [groups, steps].

    Args:
      setting_of: maps a row of `rows` to the setting of its group.
      rows: float64 [groups, ...].
      steps: number of steps.
      seed: seed of the noise.
      distance: every coordinate of the workers' start; the minimum is at 0.
    """
    dimension = len(CURVATURE)

    def at(schedule, k):
        return schedule(k) if callable(schedule) else schedule

    def method(row, key):
        rate, pull, *_ = setting_of(row)
        # optax counts the steps before this one; a pull counts this one, too.
        return lgd(lambda k: at(rate, k), lambda t: at(rate, t - 1) * at(pull, t - 1))

    def noisy(x, k, row, key):
        _, _, sigma, sigma_f = setting_of(row)
        draws = jax.random.normal(jax.random.fold_in(key, k), (dimension + 1,))
        grad = jnp.asarray(CURVATURE) * x
        value = jnp.sum(grad * x) / 2
        noise = sigma / jnp.sqrt(dimension) * draws[1:]
        return value + sigma_f * draws[0], grad + noise

    def height(before, *_):
        return jnp.sum(jnp.asarray(CURVATURE) * before[0] ** 2) / 2

    groups = len(rows), WORKERS
    keys = jax.random.split(jax.random.key(seed), groups)
    starts = np.full((*groups, dimension), distance)
    return descent(method, noisy, steps, height)(starts, (rows,), (keys,))[0].mean(axis=1)


def bound(setting: DescentSettings) -> float:
    """Returns ½ηκσ² + (4/m)λ√p σ_f."""
    rate, pull, sigma, sigma_f = setting
    by_gradients = rate * CONDITION * sigma**2 / 2
    return by_gradients + 4 / CONVEXITY * pull * np.sqrt(WORKERS) * sigma_f


def check(seed: int = 0, groups: int = 200, steps: int = 1500) -> Findings:
    """Compares all combinations of pulls and noises, `groups` groups of each."""
    rate = 1 / (2 * SMOOTHNESS)
    settings = [
        DescentSettings(rate, fraction / (2 * CONDITION) / rate, 1.0, sigma_f)
        for fraction in (0.0, 0.1, 1.0)
        for sigma_f in (0.0, 1.0, 10.0)
    ]
    rows = np.repeat(np.array(settings), groups, axis=0)
    heights = descend(lambda row: DescentSettings(*row), rows, steps, seed)
    means = heights.reshape(len(settings), groups, steps).mean(axis=1)
    reached = means[:, steps // 2 :].max(axis=1)
    allowed = np.array([bound(setting) for setting in settings])
    claim = Claim(
        "noisy leader: limsup E f − f* ≤ ½ηκσ² + (4/m)λ√p σ_f",
        f"highest tail mean of {groups * WORKERS} workers / bound, worst of "
        f"{len(settings)} settings of λ, σ_f",
        float((reached / allowed).max()),
        1.0,
    )
    return Findings([claim])


def decreasing(row: Any) -> DescentSettings:
    """Returns the setting with η_k and λ_k for a row (σ_f,)."""

    def late(k):
        return k + 4 * CONDITION

    def rate(k):
        return 2 / (CONVEXITY * late(k))

    return DescentSettings(rate, lambda k: PULL / late(k), SIGMA, row[0])


def constant(sigma_f: float) -> float:
    """Returns the constant v of the bound."""
    start = 4 * CONDITION * CURVATURE.sum() * DISTANCE**2 / 2
    by_gradients = 2 * SMOOTHNESS * SIGMA**2 / CONVEXITY**2
    by_losses = 8 * PULL * np.sqrt(WORKERS) * sigma_f / CONVEXITY
    return max(start, by_gradients + by_losses)


def slope(late: np.ndarray, heights: np.ndarray) -> float:
    """Returns the exponent of a power law through the last nine tenths of the steps."""
    tail = slice(len(late) // 10, None)
    return float(np.polyfit(np.log(late[tail]), np.log(heights[tail]), 1)[0])


def check_decreasing(seed: int = 0, groups: int = 100, steps: int = 10000) -> Findings:
    """Compares the heights with the bound, for both levels of noise in the losses."""
    rows = np.repeat(np.array(LOSS_NOISES)[:, None], groups, axis=0)
    heights = descend(decreasing, rows, steps, seed, DISTANCE)
    means = heights.reshape(len(LOSS_NOISES), groups, steps).mean(axis=1)
    late = np.arange(steps) + 4 * CONDITION
    allowed = np.array([constant(sigma_f) for sigma_f in LOSS_NOISES])[:, None] / late
    slopes = [slope(late, mean) for mean in means]
    over = f"{groups * WORKERS} workers, σ_f in {LOSS_NOISES}"
    claims = [
        Claim(
            "η_k, λ_k = Θ(1/k): E f(x_k) − f* ≤ v/(k + 4κ)",
            f"(E f − f*)(k + 4κ)/v, highest of {steps} steps, {over}",
            float((means / allowed).max()),
            1.0,
            1e-12,
        ),
        Claim(
            "η_k, λ_k = Θ(1/k): E f(x_k) − f* = O(1/k)",
            "exponent of a power law through the last nine tenths of the steps, worst",
            max(slopes),
            -1.0,
            0.05,
        ),
    ]
    return Findings(claims)
