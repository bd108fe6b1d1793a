"""How figures look: sizes, colors, axes, and how they are saved."""

import functools
import pathlib
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, NullFormatter


matplotlib.use("agg")  # no window

subplots = functools.partial(plt.subplots, layout="constrained")
BLUE = "#2566a8"
ORANGE = "#d9731a"
GREY = "#9aa0a6"


def tidy(figure: Any) -> Any:
    """Returns the figure without top and right frames, and with a light grid."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def save(figure: Any, path: pathlib.Path) -> None:
    """Writes a figure, tidied, and frees its memory."""
    tidy(figure).savefig(path, dpi=120)
    plt.close(figure)


def plain_numbers(axis: Any) -> None:
    """Labels a logarithmic axis with 10 instead of 10¹, and minor ticks if it is short."""
    low, high = axis.get_view_interval()
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:g}" if high < 30 * low else NullFormatter())


def whole_numbers(axis: Any) -> None:
    """Labels an axis with integers only."""
    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
