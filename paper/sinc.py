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
from typing import Any

import numpy as np

import lsgd_jax as lj
from paper import output
from paper.sinc_figures import draw_objective, draw_trajectories
from paper.sinc_landscape import METHODS, REACHED, STARTS, Trajectories, descend
from train.metrics import tables


@dataclasses.dataclass(frozen=True)
class Options(output.Options):
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
    column, table = "best worker on the global ring, %", []
    for method in METHODS:
        best = descend(method, starts, iterations).value[:, :, -1].min(axis=1)
        share = float((best < REACHED).mean())
        error = math.sqrt(share * (1 - share) / count)
        reached = {column: f"{100 * share:.1f} ± {100 * error:.1f}"}
        row = {"method": method, "starts": count, "iterations": iterations}
        table.append(row | reached)
    return table


def run(options: Options) -> output.Results:
    """Runs the experiment."""
    paths = {name: descend(name, STARTS[None], options.iterations) for name in METHODS}
    table = random_starts(options.starts, options.random_iterations, options.seed)
    text = tables.markdown(table)
    ends = lambda path: ", ".join(f"{value:.6f}" for value in path.value[0, :, -1])
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
