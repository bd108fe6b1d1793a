r"""The η and α for which EASGD in round robin is stable on f(x) = x²/2.

The workers and the center take turns, with the old values on both right sides:

.. math::
  x_i \leftarrow x_i - \eta x_i - \alpha (x_i - c), \qquad
  c \leftarrow c + \alpha (x_i - c), \qquad i = t \bmod p,

so a round of p workers is the linear map F = F_{p-1} ⋯ F_0 of (x_0, …, x_{p-1}, c). The
method is stable if no eigenvalue of F has a modulus above 1. The claim is that this holds
for any p if

.. math:: 0 \le \eta \le 2, \qquad 0 \le \alpha \le \frac{4 - 2\eta}{4 - \eta},

because every F_i is symmetric and then has norm at most 1. For p = 1 this condition is
necessary, too. The map for p = 1 is also read off the library's own EASGD step: one of two
workers is left out because its loss is nan, which leaves EASGD with one worker and α = β/2.
The library clips pulls at their target, so this is done where 0 ≤ α ≤ 1, which contains the
claimed region.

Source: Zhang, Choromanska, LeCun, Deep Learning with Elastic Averaging SGD, NeurIPS 2015,
section on the stability of EASGD and ADMM.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from matplotlib import pyplot as plt

from paper.descent import descent, easgd
from paper.statements.claim import Claim, Findings


def round_map(eta: Any, alpha: Any, workers: int) -> np.ndarray:
    """Returns F [..., p + 1, p + 1] for η and α, which are broadcast to one shape [...]."""
    eta, alpha = np.broadcast_arrays(eta, alpha)
    identity = np.zeros((*eta.shape, workers + 1, workers + 1)) + np.eye(workers + 1)
    whole = identity
    for i in range(workers):
        one = identity.copy()
        one[..., i, i], one[..., i, -1] = 1 - eta - alpha, alpha
        one[..., -1, i], one[..., -1, -1] = alpha, 1 - alpha
        whole = one @ whole
    return whole


def radius(matrix: np.ndarray) -> np.ndarray:
    """Returns the spectral radius of each matrix [..., n, n]."""
    return np.abs(np.linalg.eigvals(matrix)).max(axis=-1)


def limit(eta: np.ndarray) -> np.ndarray:
    """Returns the claimed largest α.

    >>> limit(np.array([0.0, 2.0])).tolist()
    [1.0, 0.0]
    """
    return (4 - 2 * eta) / (4 - eta)


def largest_stable(eta: np.ndarray, workers: int) -> np.ndarray:
    """Returns the largest stable α by bisection, from 0 (stable) to 2.5 (unstable)."""
    low = np.zeros_like(eta)
    high = np.full_like(eta, 2.5)
    for _ in range(60):
        middle = (low + high) / 2
        stable = radius(round_map(eta, middle, workers)) <= 1 + 1e-12
        low = np.where(stable, middle, low)
        high = np.where(stable, high, middle)
    return low


def library_map(eta: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Returns the map (x, c) -> (x, c) of a step of `lj.easgd` with one worker.

    η and α are [cases], the matrices [cases, 2, 2]. Their columns are the images of (1, 0)
    and (0, 1). The center starts at the mean of both workers, so the start of the worker
    that is left out sets c.
    """
    starts = np.array([[1.0, -1.0], [0.0, 2.0]])
    count = len(eta)

    def half(x, k, eta, alpha, out):
        return jnp.where(out, jnp.nan, x * x / 2), x

    run = descent(
        lambda eta, alpha, out: easgd(eta, lambda _: 2 * alpha),
        half,
        look=lambda before, after, value: optax.tree.get(after[1], "center").value,
    )
    out = np.broadcast_to([False, True], (2 * count, 2))
    data = (np.tile(eta, 2), np.tile(alpha, 2)), (out,)
    center, x = run(np.repeat(starts, count, axis=0), *data)
    columns = np.stack([x[:, 0], center[:, 0, 0]], axis=1)
    return columns.reshape(2, count, 2).transpose(1, 2, 0)


def check(seed: int = 0, grid: int = 121, workers: int = 8) -> Findings:
    """Maps the stable region. Nothing is random, so the seed has no effect."""
    del seed
    counts = range(1, workers + 1)
    eta = np.linspace(0, 2, grid)
    share = np.linspace(0, 1, grid)[:, None]
    inside = [radius(round_map(eta, share * limit(eta), p)).max() for p in counts]

    # A grid inside and outside of the region, without points on its border.
    eta_all, alpha_all = np.meshgrid(
        np.linspace(-0.51, 3.01, grid), np.linspace(-0.203, 1.507, grid)
    )
    claimed = (0 <= eta_all) & (eta_all <= 2)
    claimed &= (0 <= alpha_all) & (alpha_all <= limit(eta_all))
    matrix = round_map(eta_all, alpha_all, 1)
    unlike = (radius(matrix) <= 1 + 1e-12) != claimed
    allowed = (0 <= alpha_all) & (alpha_all <= 1)  # outside, pulls are clipped
    read_off = library_map(eta_all[allowed], alpha_all[allowed])

    borders = {p: largest_stable(eta, p) for p in counts}
    beyond = {p: float((border - limit(eta)).max()) for p, border in borders.items()}
    claims = [
        Claim(
            "EASGD round robin on x²/2 is stable if 0 ≤ η ≤ 2, 0 ≤ α ≤ (4 − 2η)/(4 − η)",
            f"spectral radius, largest of {grid}² points for each p = 1 … {workers}",
            float(max(inside)),
            1.0,
            1e-9,
        ),
        Claim(
            "EASGD with one worker: and only if",
            f"points of {grid}² in [−0.5, 3] × [−0.2, 1.5] where stability differs, p = 1",
            float(unlike.sum()),
        ),
        Claim(
            "EASGD with one worker: the border is α = (4 − 2η)/(4 − η)",
            f"distance of the largest stable α from it, worst of {grid} η",
            float(np.abs(borders[1] - limit(eta)).max()),
            tolerance=1e-9,
        ),
        Claim(
            "EASGD with one worker: the map is that of the library's step",
            f"entries of the map, largest deviation at {allowed.sum()} points, 0 ≤ α ≤ 1",
            float(np.abs(read_off - matrix[allowed]).max()),
            tolerance=1e-14,
        ),
    ]
    excess = ", ".join(f"{beyond[p]:.2g} (p = {p})" for p in counts if p > 1)
    remarks = [
        "With several workers the condition is sufficient, and tight only for odd p: the "
        f"largest stable α exceeds (4 − 2η)/(4 − η) by up to {excess}."
    ]
    pair = radius(round_map(eta_all, alpha_all, 2))
    return Findings(claims, remarks, draw(eta_all, alpha_all, [radius(matrix), pair]))


def draw(eta: np.ndarray, alpha: np.ndarray, radii: list[np.ndarray]) -> Any:
    """Draws the spectral radius over η and α, for one and for two workers."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    border = np.linspace(0, 2, 101)
    levels = np.linspace(0, 2, 21)
    style = {"cmap": "RdBu_r", "extend": "max"}
    images = []
    for p, (axes, largest) in enumerate(zip(panels, radii), start=1):
        images.append(axes.contourf(eta, alpha, largest, levels, **style))
        axes.contour(eta, alpha, largest, [1 + 1e-9], colors="black", linewidths=1.4)
        axes.plot(border, limit(border), "--", color="tab:green", lw=2)
        axes.set_xlabel("η")
        axes.set_title(f"p = {p}", fontsize=10)
    panels[0].set_ylabel("α")
    figure.colorbar(images[-1], ax=panels, label="spectral radius")
    figure.suptitle("black: stable inside; green, dashed: (4 − 2η)/(4 − η)", fontsize=10)
    return figure
