r"""With noisy gradients and a leader elected by noisy losses LSGD stays near the minimum.

For p workers, gradients of variance σ², losses of variance σ_f², constant η and λ within
the limits of `one_step`, and m-strongly convex f with condition number κ,

.. math::
  \limsup_k E f(x_k) - f^* \le \tfrac12 \eta\kappa\sigma^2
    + \frac4m \lambda \sqrt p \, \sigma_f .

Checked on f(x) = ½xᵀHx in ten dimensions with eigenvalues from 1 to 10. The bound is
compared with the largest tail value of the mean over many independent groups of four
workers.

Paper: theorem on stochastic leader selection.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paper.descent import descent, lgd
from paper.statements.claim import Claim, Outcome


WORKERS = 4  # p
CURVATURE = np.linspace(1.0, 10.0, 10)  # H, a diagonal
CONVEXITY, SMOOTHNESS = CURVATURE.min(), CURVATURE.max()  # m, M
CONDITION = SMOOTHNESS / CONVEXITY  # κ


class Setting(NamedTuple):
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
    setting_of: Callable[[Any], Setting],
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
    at = lambda schedule, k: schedule(k) if callable(schedule) else schedule

    def method(row, key):
        rate, pull, *_ = setting_of(row)
        # optax counts the steps before this one; a pull counts this one, too.
        return lgd(lambda k: at(rate, k), lambda t: at(rate, t - 1) * at(pull, t - 1))

    def noisy(x, k, row, key):
        _, _, sigma, sigma_f = setting_of(row)
        draws = jax.random.normal(jax.random.fold_in(key, k), (dimension + 1,))
        grad = jnp.asarray(CURVATURE) * x
        value, noise = jnp.sum(grad * x) / 2, sigma / jnp.sqrt(dimension) * draws[1:]
        return value + sigma_f * draws[0], grad + noise

    height = lambda before, *_: jnp.sum(jnp.asarray(CURVATURE) * before[0] ** 2) / 2
    groups = len(rows), WORKERS
    keys = jax.random.split(jax.random.key(seed), groups)
    starts = np.full((*groups, dimension), distance)
    return descent(method, noisy, steps, height)(starts, (rows,), (keys,))[0].mean(axis=1)


def bound(setting: Setting) -> float:
    """Returns ½ηκσ² + (4/m)λ√p σ_f."""
    rate, pull, sigma, sigma_f = setting
    by_gradients = rate * CONDITION * sigma**2 / 2
    return by_gradients + 4 / CONVEXITY * pull * np.sqrt(WORKERS) * sigma_f


def check(seed: int = 0, groups: int = 200, steps: int = 1500) -> Outcome:
    """Compares all combinations of pulls and noises, `groups` groups of each."""
    rate = 1 / (2 * SMOOTHNESS)
    settings = [
        Setting(rate, fraction / (2 * CONDITION) / rate, 1.0, sigma_f)
        for fraction in (0.0, 0.1, 1.0)
        for sigma_f in (0.0, 1.0, 10.0)
    ]
    rows = np.repeat(np.array(settings), groups, axis=0)
    heights = descend(lambda row: Setting(*row), rows, steps, seed)
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
    return Outcome([claim])
