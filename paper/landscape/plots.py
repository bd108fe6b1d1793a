"""The figure of a landscape: contours, positions of the workers, the trajectory."""

from textwrap import fill
from typing import Any, BinaryIO

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, Normalize
from matplotlib.ticker import FuncFormatter, MaxNLocator

from paper.landscape.compute import Landscape
from paper.landscape.loss import Map
from train.metrics.drawing import BLUE, GREY, tidy


INK, RED = "#1f2328", "#b3261e"
# Markers and their sizes, the worker's first.
MARKERS = (("o", 70), ("^", 80), ("*", 160), ("P", 90), ("D", 60), ("X", 90))
PULL_MARKERS = (("|", 40), ("x", 30), ("+", 40))
LABEL = 0.04  # size of a worker's number, as a share of the figure's width
ON_PLANE = 1e-3  # points this close, relative to the width, count as in the plane
CONTOURS = 16
ARROWS = 3
LOSSES = LinearSegmentedColormap.from_list("losses", ["#f6f9fc", BLUE])
# Dark where the trajectory is in the plane, faint where it is far off.
OFF_PLANE = LinearSegmentedColormap.from_list(
    "off", matplotlib.colormaps["OrRd"](np.linspace(0.95, 0.35, 64))
)


def levels_of(values: np.ndarray, logarithmic: bool) -> np.ndarray:
    """Returns contour levels from the lowest to the highest finite value.

    They have equal gaps, or the excess over the lowest value grows by equal ratios from a
    first level that has a sixteenth of the map below it. A valley then shows its shape
    whether its floor is near 0 or not, and a plain in front of a cliff shows its slopes.

    >>> levels_of(np.array([1.0, np.nan, 9.0]), logarithmic=False)[[0, 8, 16]].tolist()
    [1.0, 5.0, 9.0]
    >>> levels_of(5 + np.arange(17.0) ** 2, logarithmic=True)[[0, 1, 16]].tolist()
    [5.0, 6.0, 261.0]
    """
    known = values[np.isfinite(values)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
    if high - low <= 1e-6 * abs(high):  # flat: one color
        low = low - 0.01 * abs(low) - (low == 0)
        high = high + 0.01 * abs(high)
    if not logarithmic or not known.size:
        return np.linspace(low, high, CONTOURS + 1)
    first = np.quantile(known - low, 1 / CONTOURS)
    first = np.clip(first, 1e-6 * (high - low), (high - low) / CONTOURS)
    return np.append(low, low + np.geomspace(first, high - low, CONTOURS))


def draw(landscape: Landscape, file: BinaryIO, author: str) -> None:
    """Draws a landscape as PNG, with the author in its metadata."""
    panels = {map_.name: map_ for map_ in landscape.maps}
    has_path = len(landscape.steps) > 1
    mosaic: Any = [list(panels), ["path"] * len(panels)] if has_path else [list(panels)]
    figure, axes = plt.subplot_mosaic(
        mosaic,
        figsize=(0.6 + 6.2 * len(panels), 7.4 + 1.7 * has_path),
        height_ratios=(7, 1.5) if has_path else (1,),
        layout="constrained",
    )
    tidy(figure)
    for name, map_ in panels.items():
        _contours(figure, axes[name], landscape, map_)
        _workers(axes[name], landscape)
        if has_path:
            _path(axes[name], landscape)
    wrapped = [fill(line, 88 * len(panels)) for line in landscape.title.splitlines()]
    figure.legend(
        *axes["train"].get_legend_handles_labels(),
        title="\n".join(wrapped),
        loc="outside upper center",
        ncols=2,
        fontsize=8,
        title_fontsize=10,
        alignment="center",
        frameon=False,
    )
    if has_path:
        _distances(axes["path"], landscape)
    figure.savefig(file, format="png", dpi=180, metadata={"Software": author})
    plt.close(figure)


def _contours(figure: Any, axes: Any, landscape: Landscape, map_: Map) -> None:
    """Draws the loss over training images, or the error on test images."""
    logarithmic = map_.name == "train"
    values = map_.loss if logarithmic else map_.error
    levels = levels_of(values, logarithmic)
    # Rounding must not push the extremes out of the levels.
    shown = np.ma.masked_invalid(values).clip(levels[0], levels[-1])
    grid = landscape.xs, landscape.ys, shown, levels
    filled = axes.contourf(*grid, cmap=LOSSES, norm=BoundaryNorm(levels, LOSSES.N))
    axes.contour(*grid, colors="white", linewidths=0.6)
    if not np.isfinite(values).all():
        axes.set_facecolor(GREY)
        axes.fill_between([], [], color=GREY, label="not finite")
    bar = figure.colorbar(filled, ax=axes, location="bottom", aspect=40, pad=0.02)
    bar.set_ticks(levels[:: CONTOURS // 4])
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.4g}"))
    bar.minorticks_off()
    what = "training loss" if logarithmic else "test error, %"
    bar.set_label(f"{what} ({map_.images} images)", fontsize=9)
    axes.set(aspect="equal", xlim=landscape.xs[[0, -1]], ylim=landscape.ys[[0, -1]])
    axes.set_xlabel(landscape.xlabel, fontsize=9)
    axes.set_ylabel(landscape.ylabel, fontsize=9)
    axes.grid(False)


def _path(axes: Any, landscape: Landscape) -> None:
    """Draws the projection of the trajectory, fainter where it is farther off the plane."""
    a, b, off = landscape.paths[:, landscape.worker].T
    axes.add_collection(_line(a, b, off))
    axes.plot([], [], color=RED, lw=1.3, label="its trajectory, faint where off the plane")
    axes.plot(a[0], b[0], "o", ms=5, mfc="white", mec=RED, zorder=4)
    label = {"textcoords": "offset points", "fontsize": 8, "color": RED}
    axes.annotate(f"step {landscape.steps[0]}", (a[0], b[0]), xytext=(5, 5), **label)
    _arrows(axes, np.stack([a, b], axis=1))
    _pulls(axes, landscape, a, b)


def _line(x: np.ndarray, y: np.ndarray, off: np.ndarray) -> LineCollection:
    points = np.stack([x, y], axis=1)
    pieces = np.stack([points[:-1], points[1:]], axis=1)
    scale = Normalize(0, np.nanmax(off, initial=1e-12))
    line = LineCollection(list(pieces), cmap=OFF_PLANE, norm=scale, lw=1.3, zorder=3)
    line.set_array(off[1:])
    return line


def _arrows(axes: Any, places: np.ndarray) -> None:
    """Draws arrow heads along the trajectory, at equal parts of its length."""
    gone = np.nancumsum(np.linalg.norm(np.diff(places, axis=0), axis=1))
    reach = max(1, len(gone) // 12)
    style = {"arrowstyle": "-|>", "color": RED, "lw": 0, "mutation_scale": 13}
    for part in (np.arange(ARROWS) + 0.5) / ARROWS:
        middle = int(np.searchsorted(gone, part * gone[-1]))
        ends = places[[max(0, middle - reach), min(middle + 1, len(gone))]]
        if np.isfinite(ends).all() and np.any(ends[0] != ends[1]):
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=style | {"shrinkB": 0})


def _pulls(axes: Any, landscape: Landscape, x: np.ndarray, y: np.ndarray) -> None:
    for pulls, (marker, size) in zip(landscape.pulls, PULL_MARKERS):
        at = np.isin(landscape.steps, pulls.steps)
        style = {"marker": marker, "s": size, "color": RED, "linewidths": 0.9}
        axes.scatter(x[at], y[at], zorder=4, label=pulls.name, **style)


def _workers(axes: Any, landscape: Landscape) -> None:
    """Draws the marks, filled if they are in the plane, and the numbers of all workers."""
    width = landscape.xs[-1] - landscape.xs[0]
    for mark, (marker, size) in zip(landscape.marks, MARKERS):
        a, b, off = mark.place
        if off < ON_PLANE * width:
            label = f"{mark.name}: loss {mark.loss:.3g}"
            colors = (INK, "white")
        else:
            label = f"{mark.name}: {off:.2g} off the plane"
            colors = ("none", INK)
        style = {"facecolor": colors[0], "edgecolor": colors[1], "linewidths": 0.8}
        axes.scatter(a, b, s=size, marker=marker, zorder=5, label=label, **style)
    a, b, _ = landscape.positions.T
    axes.scatter(a, b, s=6, color=INK, alpha=0.6, zorder=3)
    number = {"textcoords": "offset points", "fontsize": 8, "color": INK, "clip_on": True}
    for place, text in numbers(np.stack([a, b], axis=1), LABEL * width):
        axes.annotate(text, place, xytext=(5, -10), alpha=0.7, **number)


def numbers(places: np.ndarray, reach: float) -> list[tuple[np.ndarray, str]]:
    """Returns the numbers of workers as (place, text), one text for workers close by.

    Args:
      places: positions of the workers, [W, 2].
      reach: the distance below which two texts would overlap.

    >>> numbers(np.array([[0.0, 0.0], [5.0, 0.0], [0.1, 0.0]]), 1.0)
    [(array([0., 0.]), '0, 2'), (array([5., 0.]), '1')]
    """
    groups: list[list[int]] = []
    for worker, place in enumerate(places):
        near = [g for g in groups if np.abs(place - places[g[0]]).max() < reach]
        if near:
            near[0].append(worker)
        elif np.isfinite(place).all():
            groups.append([worker])
    return [(places[group[0]], ", ".join(map(str, group))) for group in groups]


def _distances(axes: Any, landscape: Landscape) -> None:
    """Draws the worker's distance from its last position, and from the plane."""
    a, b, off = landscape.paths[:, landscape.worker].T
    ahead = np.hypot(a - a[-1], b - b[-1])
    axes.plot(
        landscape.steps,
        ahead,
        color=GREY,
        lw=1.3,
        label="in the plane, from its last position",
    )
    axes.add_collection(_line(landscape.steps, off, off))
    axes.plot([], [], color=RED, lw=1.3, label="off the plane")
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="best")
    _pulls(axes, landscape, landscape.steps, off)
    known = np.concatenate([ahead, off])
    axes.set_xlim(landscape.steps[0], landscape.steps[-1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.3 * np.max(known[np.isfinite(known)], initial=1e-12))
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("distance", fontsize=9)
