"""Four workers on the sinc landscape: LGD finds the global minimum, EASGD stalls.

    python -m paper sinc --out DIR

L(x, y) = sin(πr) / (πr), r = √(x² + y²), has its global minimum -0.217234 on the ring
r = 1.43030 and a local minimum on every second ring further out. DIR gets the
trajectories of both methods (`trajectories.png`, `lgd.csv`, `easgd.csv`), the objective of
every worker (`objective.png`), and how often the best worker reaches the global ring from
random starts (`random-starts.md`). Seconds on a CPU, in float64.

Settings: learning rate 0.1, pull 0.1 (LGD), β = 0.43 (EASGD), full gradients.
"""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import lsgd_jax as lj
from paper import output
from paper.sinc_figures import draw_objective, draw_trajectories
from paper.sinc_landscape import METHODS, REACHED, STARTS, Trajectories, descend
from train.arguments import Parser
from train.metrics import tables


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
        table.append(
            {
                "method": method,
                "starts": count,
                "iterations": iterations,
                column: f"{100 * share:.1f} ± {100 * error:.1f}",
            }
        )
    return table


def parse(arguments: Sequence[str]) -> Any:
    """The options.

    Raises:
      ValueError: a count below 1, or an unknown option.
    """
    parser = Parser("python -m paper sinc", __doc__)
    counts = {
        "iterations": (100, "of the trajectories, the start included"),
        "starts": (300, "random starts of four workers"),
        "random-iterations": (400, "from each random start"),
    }
    for name, (default, text) in counts.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument("--seed", type=int, default=0, help="of the random starts")
    output.add_out(parser, "sinc")
    options = parser.parse_args(arguments)
    for name in counts:
        lj.checks.check_positive_int(name, getattr(options, name.replace("-", "_")))
    lj.checks.check_not_negative("seed", options.seed)
    return options


def write(
    paths: dict[str, Trajectories], table: list[dict[str, Any]], out: pathlib.Path
) -> None:
    """Writes all files of the experiment."""
    for method, path in paths.items():
        tables.write_csv(rows(path), out / f"{method.lower()}.csv")
    output.save(draw_trajectories(paths), out / "trajectories.png")
    output.save(draw_objective(paths), out / "objective.png")
    (out / "random-starts.md").write_text(tables.markdown(table), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment."""
    options = parse(arguments)
    out = output.new_folder(options.out, "sinc")
    with jax.enable_x64(True):
        paths = {name: descend(name, STARTS[None], options.iterations) for name in METHODS}
        table = random_starts(options.starts, options.random_iterations, options.seed)
    write(paths, table, out)
    for method, path in paths.items():
        ends = ", ".join(f"{value:.6f}" for value in path.value[0, :, -1])
        print(f"{method}: L after {options.iterations} iterations: {ends}")
    print(f"{tables.markdown(table)}everything is in {out}")
    return 0
