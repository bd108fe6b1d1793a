r"""With η_k = Θ(1/k) and λ_k = Θ(1/k) LSGD converges at the rate O(1/k).

With K = k + 4κ, η_k = 2/(mK), which is at most 1/(2M), and λ_k = l/K, the bounds of
`one_step` and `noisy_leader` give by induction

.. math::
  E f(x_k) - f^* \le \frac vK, \qquad
  v = \max\left(4\kappa (f(x_0) - f^*), \;
    \frac{2 M \sigma^2}{m^2} + \frac{8 l \sqrt p \, \sigma_f}{m}\right).

Checked on the problem of `noisy_leader`, with exact and with noisy losses.

Paper: corollary on decreasing learning rates.
"""

from typing import Any

import numpy as np

from paper.statements.claim import Claim, Outcome
from paper.statements.noisy_leader import (
    CONDITION,
    CONVEXITY,
    CURVATURE,
    SMOOTHNESS,
    WORKERS,
    Setting,
    descend,
)


SIGMA, PULL = 3.0, 20.0  # σ, l
LOSS_NOISES = (0.0, 1.0)  # σ_f
DISTANCE = 0.3


def setting_of(row: Any) -> Setting:
    """Returns the setting with η_k and λ_k for a row (σ_f,)."""
    late = lambda k: k + 4 * CONDITION
    rate = lambda k: 2 / (CONVEXITY * late(k))
    return Setting(rate, lambda k: PULL / late(k), SIGMA, row[0])


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


def check(seed: int = 0, groups: int = 100, steps: int = 10000) -> Outcome:
    """Compares the heights with the bound, for both levels of noise in the losses."""
    rows = np.repeat(np.array(LOSS_NOISES)[:, None], groups, axis=0)
    heights = descend(setting_of, rows, steps, seed, DISTANCE)
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
    return Outcome(claims)
