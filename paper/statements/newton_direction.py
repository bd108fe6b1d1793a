r"""On a convex quadratic most leaders turn the step towards the Newton direction.

At x, with f(x) = ½xᵀHx, a worker with leader z steps along d(z) = −∇f(x) − λ(x − z), and
Newton's method along n = −x. Let θ be the angle between −∇f(x) and n. For at least half of
the possible leaders, the ellipsoid {z : f(z) ≤ f(x)}, the angle between d(z) and n is at
most θ if

- λ is small. The share of such leaders falls with λ; its limit for λ → 0 is at least ½. In
  the plane it equals this limit as long as λ · diameter of the ellipse ≤ ‖∇f(x)‖ sin 2θ; or
- −∇f(x) is far from n. In the plane this means θ ≥ 45°, and then λ may have any value.

Checked in the plane with H = diag(1, κ) and x at many angles from the first axis. A share
is the mean over a grid of 200 × 400 leaders, uniform over the ellipse.

Paper: theorem on the improvement of the step direction, with the shares for κ = 10.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from matplotlib import pyplot as plt

from paper.descent import descent, lgd
from paper.statements.claim import Claim, Findings
from train.metrics.drawing import GREY


RATE = 1e-4
# (angle of x in degrees, λ) -> the share for κ = 10
PUBLISHED = {
    (10, 1): 0.938,
    (45, 1): 0.67,
    (80, 1): 0.533,
    (80, 0.1): 0.533,
    (80, 10): 0.131,
}
READ_OFF = 2e-3
LARGE = 1000.0  # a λ that is far from small


def place(angle: float) -> np.ndarray:
    """Returns x at an angle in degrees from the first axis.

    >>> place(90.0).round(3).tolist()
    [0.0, 1.0]
    """
    return np.array([np.cos(np.radians(angle)), np.sin(np.radians(angle))])


def leaders(x: np.ndarray, h: np.ndarray, radii: int, turns: int) -> np.ndarray:
    """Returns a grid [radii · turns, 2], uniform over the ellipse {z : f(z) < f(x)}."""
    radius = np.sqrt((np.arange(radii) + 0.5) / radii)
    turn = 2 * np.pi * (np.arange(turns) + 0.5) / turns
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=-1)
    disc = radius[:, None, None] * circle[None]
    return disc.reshape(-1, 2) * np.sqrt(x @ (h * x) / h)


def turn_of(x: np.ndarray, h: np.ndarray) -> float:
    """Returns θ, the angle between −∇f(x) and the Newton direction, in degrees."""
    cosine = (h * x) @ x / np.linalg.norm(h * x) / np.linalg.norm(x)
    return float(np.degrees(np.arccos(min(cosine, 1.0))))


def small_pull(x: np.ndarray, h: np.ndarray) -> float:
    """Returns ‖∇f‖ sin 2θ / diameter: up to this λ the share equals its limit."""
    diameter = 2 * np.sqrt(x @ (h * x) / h.min())
    bend = np.sin(2 * np.radians(turn_of(x, h)))
    return float(np.linalg.norm(h * x) * bend / diameter)


def share_measurer(radii: int, turns: int) -> Callable[..., float]:
    """Returns share(x, h, λ), measured by steps of the library, one for each leader.

    A leader counts if the angle between its step and the Newton direction is at most θ.
    """
    quadratic = jax.value_and_grad(lambda x, h: x @ (h * x) / 2)
    run = descent(
        lambda h, pull: lgd(RATE, lambda _: RATE * pull),
        lambda x, k, h, pull: quadratic(x, h),
    )

    def share(x: np.ndarray, h: np.ndarray, pull: float) -> float:
        z = leaders(x, h, radii, turns)
        pairs = np.stack([np.broadcast_to(x, z.shape), z], axis=1)

        def everywhere(a):
            return np.broadcast_to(a, (len(z), *np.shape(a)))

        _, ends = run(pairs, (everywhere(h), everywhere(np.float64(pull))))
        steps = ends[:, 0] - x
        cosines = -(steps @ x) / np.linalg.norm(steps, axis=1) / np.linalg.norm(x)
        return float((cosines >= np.cos(np.radians(turn_of(x, h))) - 1e-9).mean())

    return share


def check(seed: int = 0, radii: int = 200, turns: int = 400, angles: int = 45) -> Findings:
    """Measures the shares. Nothing is random, so the seed has no effect."""
    del seed
    share = share_measurer(radii, turns)
    ten = np.array([1.0, 10.0])
    published = [
        share(place(a), ten, pull) - known for (a, pull), known in PUBLISHED.items()
    ]
    grid = np.linspace(1, 89, angles)
    spectra = [np.array([1.0, kappa]) for kappa in (2.0, 10.0, 100.0)]
    spots = [(place(angle), h) for h in spectra for angle in grid]
    small = [share(x, h, small_pull(x, h)) for x, h in spots]
    far = [share(x, h, LARGE) for x, h in spots if turn_of(x, h) >= 45]
    tolerance = 1 / turns
    claims = [
        Claim(
            "shares of {z : f(z) ≤ f(x)} that turn the step towards Newton's, κ = 10",
            "deviation from 0.938 (10°), 0.67 (45°), 0.533 (80°; λ ≤ 1), 0.131 (80°; "
            "λ = 10), worst",
            float(np.abs(published).max()),
            tolerance=READ_OFF,
        ),
        Claim(
            "λ small: at least half",
            f"least share of {len(small)} places x, κ = 2, 10, 100, at "
            "λ = ‖∇f‖ sin 2θ / diameter",
            min(small),
            0.5,
            tolerance,
            "≥",
        ),
        Claim(
            "∇f far from Newton's direction (θ ≥ 45°): at least half",
            f"least share of {len(far)} places x, κ = 10, 100, at λ = {LARGE:.0f}",
            min(far, default=float("nan")),
            0.5,
            tolerance,
            "≥",
        ),
    ]
    pulls = (0.01, 1.0, 10.0, LARGE)
    curves = {pull: [share(place(a), ten, pull) for a in grid] for pull in pulls}
    near = min(zip(curves[1.0], grid))
    remarks = [
        "How small λ must be depends on x. Where ∇f is nearly Newton's direction, λ = 1 is "
        f"too large (κ = 10: share {near[0]:.3f} at {near[1]:.0f}°)."
    ]
    return Findings(claims, remarks, draw(grid, curves))


def draw(grid: np.ndarray, curves: dict[float, list[float]]) -> Any:
    """Draws the share over the angle of x for several λ, and the published shares."""
    figure, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
    axes.axhline(0.5, color=GREY, lw=1)
    for pull, shares in curves.items():
        axes.plot(grid, shares, lw=1.4, label=f"λ = {pull:g}")
    angles = [angle for angle, _ in PUBLISHED]
    axes.plot(angles, list(PUBLISHED.values()), "ko", mfc="none", label="published")
    axes.set(xlim=(0, 90), ylim=(0, 1))
    axes.set(
        xlabel="angle of x from the flat axis, °", ylabel="share of leaders towards Newton"
    )
    axes.set_title("f = ½xᵀdiag(1, 10)x", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return figure
