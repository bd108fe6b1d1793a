"""Pictures of gossip graphs: python -m train.graphs ring 8 ring.png."""

import pathlib
import sys
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

import lsgd_jax as lj


def draw(topology: lj.topology.Topology, path: pathlib.Path) -> pathlib.Path:
    """Draws every round of a graph: workers on a circle, an arrow for every message."""
    count, rounds = topology.num_workers, topology.rounds
    angles = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    figure, panels = plt.subplots(
        1, len(rounds), figsize=(3 * len(rounds), 3.3), squeeze=False, layout="constrained"
    )
    for r, (axes, round) in enumerate(zip(panels[0], rounds)):
        for source, destination in (edge for permutation in round for edge in permutation):
            _arrow(axes, places[source], places[destination])
        axes.scatter(*places.T, s=260, color="white", edgecolor="black", zorder=3)
        for worker, (x, y) in enumerate(places):
            axes.text(x, y, str(worker), ha="center", va="center", fontsize=9, zorder=4)
        axes.set_title(f"round {r + 1} of {len(rounds)}", fontsize=10)
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
        axes.axis("off")
    figure.suptitle(f"{topology.name}, spectral gap {topology.spectral_gap:.3g} per step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _arrow(axes: Any, start: np.ndarray, end: np.ndarray) -> None:
    style = {"arrowstyle": "->", "color": "#2566a8", "shrinkA": 9, "shrinkB": 9}
    bend = {"connectionstyle": "arc3,rad=0.12"}  # there and back stay apart
    axes.annotate("", xy=end, xytext=start, arrowprops=style | bend)


BUILDERS = ("ring", "exponential", "bipartite_exponential", "complete")


def main(arguments: list[str]) -> int:
    """Draws the graph named on the command line."""
    usage = (
        f"python -m train.graphs NAME WORKERS FILE.png, NAME one of {', '.join(BUILDERS)}"
    )
    if arguments in (["-h"], ["--help"]):
        print(usage)
        return 0
    if len(arguments) != 3 or arguments[0] not in BUILDERS or not arguments[1].isdigit():
        print(f"error: {usage}", file=sys.stderr)
        return 2
    name, workers, path = arguments
    try:
        topology = getattr(lj.topology, name)(int(workers))
        print(draw(topology, pathlib.Path(path)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(topology)
    return 0
