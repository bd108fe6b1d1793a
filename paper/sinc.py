"""Four workers on the sinc landscape: LGD finds the global minimum, EASGD stalls.

    python -m paper sinc --out DIR

L(x, y) = sin(πr) / (πr), r = √(x² + y²), has its global minimum -0.217234 on the ring
r = 1.43030 and a local minimum on every second ring further out. DIR gets the
trajectories of both methods (`trajectories.png`, `lgd.csv`, `easgd.csv`), the objective of
every worker (`objective.png`), and how often the best worker reaches the global ring from
random starts (`random-starts.md`). Seconds on a CPU, in float64.

Settings: learning rate 0.1, pull 0.1 (LGD), β = 0.43 (EASGD), full gradients.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib import pyplot as plt
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

import lsgd_jax as lj
from paper import output
from paper.descent import descent, easgd, lgd
from train.metrics import tables


METHODS = {"LGD": lgd(0.1, pull=0.1), "EASGD": easgd(0.1, beta=0.43)}
STARTS = np.array([(-6, -4), (-15, -18), (20, 11), (17, 8)], float)
RING, MINIMUM = 1.43030, -0.217234  # radius and value of the global minimum
REACHED = -0.2170  # a worker below this value is on the global ring


@dataclasses.dataclass(frozen=True)
class SincOptions(output.ExperimentOptions):
    """The options of the experiment."""

    # Iterations of the trajectories, the start included.
    iterations: int = 100
    # Random starts of four workers.
    starts: int = 300
    # Iterations from each random start.
    random_iterations: int = 400

    def __post_init__(self):
        super().__post_init__()
        for name in ("iterations", "starts", "random_iterations"):
            lj.checks.check_positive_int(name, getattr(self, name))


OPTIONS = SincOptions


def landscape(position: jax.Array) -> jax.Array:
    """L at a position [2]: the sinc of its distance from the origin, 1 at the origin.

    >>> round(float(landscape(jnp.array([0.0, 1.5]))), 6)
    -0.212207
    """
    return jnp.sinc(optax.safe_norm(position, 1e-12))


class Trajectories(NamedTuple):
    """Trajectories of all workers from their starts: [instances, W, iterations, ...].

    Attributes:
      position: float64 [..., 2].
      value: float64, L at the position.
      leader: int32, the leader elected there, or None.
      center: float64 [..., 2], the center at that iteration, or None.
    """

    position: np.ndarray
    value: np.ndarray
    leader: np.ndarray | None
    center: np.ndarray | None


def descend(method: str, starts: np.ndarray, iterations: int) -> Trajectories:
    """Runs all workers of all instances from starts [instances, W, 2], in one call."""
    value_and_grad = jax.value_and_grad(landscape)

    def look(before, after, value):
        x, state = before
        _, after_state = after
        center = optax.tree.get(state, "center")
        leader = lj.diagnostics(after_state)[0].leader
        return x, value, leader, center and center.value

    run = descent(lambda: METHODS[method], lambda x, k: value_and_grad(x), iterations, look)
    return Trajectories(*run(starts)[0])


def rows(path: Trajectories) -> list[dict[str, Any]]:
    """The first instance's trajectories, a row per iteration; iteration 1 is the start."""
    table = []
    for t in range(path.value.shape[2]):
        row: dict[str, Any] = {"iteration": t + 1}
        for i, (x, y) in enumerate(path.position[0, :, t].tolist()):
            row |= {f"x{i}": x, f"y{i}": y, f"L{i}": float(path.value[0, i, t])}
        if path.leader is not None:
            row["leader"] = int(path.leader[0, 0, t])
        if path.center is not None:
            row["center_x"], row["center_y"] = path.center[0, 0, t].tolist()
        table.append(row)
    return table


def random_starts(count: int, iterations: int, seed: int) -> list[dict[str, Any]]:
    """How often the best of four workers reaches the global ring, from U(-20, 20)²."""
    starts = np.random.default_rng(seed).uniform(-20, 20, (count, *STARTS.shape))
    column = "best worker on the global ring, %"
    table = []
    for method in METHODS:
        best = descend(method, starts, iterations).value[:, :, -1].min(axis=1)
        share = float((best < REACHED).mean())
        error = math.sqrt(share * (1 - share) / count)
        reached = {column: f"{100 * share:.1f} ± {100 * error:.1f}"}
        row = {"method": method, "starts": count, "iterations": iterations}
        table.append(row | reached)
    return table


def run(options: SincOptions) -> output.Results:
    """Runs the experiment."""
    paths = {name: descend(name, STARTS[None], options.iterations) for name in METHODS}
    table = random_starts(options.starts, options.random_iterations, options.seed)
    text = tables.markdown(table)

    def ends(path):
        return ", ".join(f"{value:.6f}" for value in path.value[0, :, -1])

    lines = [
        f"{method}: L after {options.iterations} iterations: {ends(path)}\n"
        for method, path in paths.items()
    ]
    return output.Results(
        summary="".join(lines) + text,
        tables={method.lower(): rows(path) for method, path in paths.items()},
        texts={"random-starts": text},
        figures={
            "trajectories": draw_trajectories(paths),
            "objective": draw_objective(paths),
        },
    )


def draw_trajectories(paths: dict[str, Trajectories]) -> Any:
    """Draws the trajectories: the whole landscape above, its middle below."""
    figure, grid = plt.subplots(2, 2, figsize=(9.4, 8.6), layout="constrained")
    style = {"cmap": "Grays", "norm": Normalize(MINIMUM, 0.4)}
    for row, width in enumerate((22.0, 5.0)):
        side = np.linspace(-width, width, 401)
        height = np.sinc(np.hypot(*np.meshgrid(side, side)))
        for axes, (method, path) in zip(grid[row], paths.items()):
            axes.pcolormesh(side, side, height, rasterized=True, **style)
            axes.contour(side, side, height, [0], colors="white", linewidths=0.5)
            circle = plt.Circle((0, 0), RING, fill=False, ls="--", lw=1, color="black")
            axes.add_patch(circle)
            for i, track in enumerate(path.position[0]):
                axes.plot(*track.T, color=f"C{i}", lw=1.4, label=f"worker {i}")
                axes.plot(*track[0], "o", color=f"C{i}", ms=5)
                axes.plot(*track[-1], "*", color=f"C{i}", ms=12, mec="white", mew=0.6)
            axes.set(xlim=(-width, width), ylim=(-width, width), aspect="equal", xlabel="x")
            axes.set_title(f"{method}{', the middle' if row else ''}", fontsize=11)
    for axes in grid[:, 0]:
        axes.set_ylabel("y")
    grid[0][0].legend(loc="upper left", fontsize=8)
    bar = {"shrink": 0.5, "aspect": 30, "extend": "max", "label": "L(x, y)"}
    figure.colorbar(ScalarMappable(**style), ax=grid, **bar)
    figure.suptitle("● start, ★ end; dashed: the global minimum, white: L = 0", fontsize=11)
    return figure


def draw_objective(paths: dict[str, Trajectories]) -> Any:
    """Draws L of every worker over the iterations, with a star for each new leader."""
    figure, panels = plt.subplots(
        1, len(paths), figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    for axes, (method, path) in zip(panels, paths.items()):
        iteration = np.arange(1, path.value.shape[2] + 1)
        axes.axhline(MINIMUM, ls="--", lw=1, color="black", label="global minimum")
        for i, values in enumerate(path.value[0]):
            axes.plot(iteration, values, color=f"C{i}", lw=1.4, label=f"worker {i}")
        if path.leader is not None:
            led = path.leader[0, 0]
            for t in np.flatnonzero(np.diff(led, prepend=-1)):
                style = {"color": f"C{led[t]}", "ms": 11, "mec": "black", "mew": 0.6}
                axes.plot(iteration[t], path.value[0, led[t], t], "*", zorder=3, **style)
        new = "" if path.leader is None else " (★ a new leader)"
        axes.set_title(f"{method}{new}", fontsize=11)
        axes.set_xlabel("iteration")
    panels[0].set_ylabel("L(x, y)")
    panels[0].legend(fontsize=8, frameon=False)
    return figure
