"""Draws a gossip graph: the workers on a circle in every round, an arrow per message.

python examples/gossip_graphs.py exponential 8 graph.png
"""

import pathlib
from typing import Literal

import matplotlib
import numpy as np
import tyro
from matplotlib import pyplot as plt

import lsgd_jax as lj


matplotlib.use("agg")  # no window
# Bent, so that messages in opposite directions do not overlap.
ARROW = {"arrowstyle": "->", "color": "#2566a8", "shrinkA": 9, "shrinkB": 9}
ARROW |= {"connectionstyle": "arc3,rad=0.12"}


def draw(topology: lj.topology.Topology, path: pathlib.Path) -> None:
    """Draws every round of a graph into a PNG file."""
    count = topology.num_workers
    rounds = topology.rounds
    angles = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    figure, panels = plt.subplots(
        1, len(rounds), figsize=(3 * len(rounds), 3.3), squeeze=False, layout="constrained"
    )
    for r, (axes, round) in enumerate(zip(panels[0], rounds)):
        for start, end in (edge for permutation in round for edge in permutation):
            axes.annotate("", xy=places[end], xytext=places[start], arrowprops=ARROW)
        axes.scatter(*places.T, s=260, color="white", edgecolor="black", zorder=3)
        for worker, (x, y) in enumerate(places):
            axes.text(x, y, str(worker), ha="center", va="center", fontsize=9, zorder=4)
        axes.set_title(f"round {r + 1} of {len(rounds)}", fontsize=10)
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
        axes.axis("off")
    figure.suptitle(f"{topology.name}, spectral gap {topology.spectral_gap:.3g} per step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(
    graph: Literal["ring", "exponential", "bipartite_exponential", "complete"],
    workers: int,
    file: pathlib.Path,
) -> None:
    """Draws a gossip graph.

    Args:
      graph: name of the graph in `lsgd_jax.topology`.
      workers: number of workers.
      file: the PNG file to write.
    """
    topology = getattr(lj.topology, graph)(workers)
    draw(topology, file)
    print(topology, file, sep="\n")


if __name__ == "__main__":
    tyro.cli(tyro.conf.configure(tyro.conf.PositionalRequiredArgs)(main))
