"""The figures of the sinc experiment."""

from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from paper.sinc_landscape import MINIMUM, RING, Trajectories


def draw_trajectories(paths: dict[str, Trajectories]) -> Any:
    """The workers' trajectories: all of the landscape above, its middle below."""
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
    """L at every worker against the iteration; a star where a new leader is elected."""
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
