"""Low-rank matrix completion: LGD converges linearly, EASGD stalls.

    python -m paper matrix-completion --out DIR

minimizes F(X) = ¼‖XXᵀ − UUᵀ‖² over X [d, r] with 8 workers, for several ranks r, on 10
instances each. The entries of U and of the workers' starts X_0 are N(0, 1); gradients are
exact and float64. DIR gets F of the best worker over the iterations (`curves.png`,
`curves.csv`) and a table (`table.md`, `table.csv`). Two minutes on 2 CPU cores.

Settings: learning rate 5e-4; every iteration pulls by 1e-4 to the leader (LGD) or to the
center (EASGD, β = 8e-4), which begins at the mean of the starts.
"""

import dataclasses
import time
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

import lsgd_jax as lj
from paper import output
from paper.descent import descent, easgd, lgd
from paper.factorization import Problem, loss_and_grad, problem_of
from train.metrics import tables
from train.metrics.drawing import BLUE, ORANGE


SMALL = 1e-7
LARGE = 1e30
Curves = dict[tuple[int, str], np.ndarray]  # (rank, method) -> [instances, iterations]


@dataclasses.dataclass(frozen=True)
class CompletionOptions(output.ExperimentOptions):
    """The options of the experiment."""

    # d, the number of rows of X.
    dimension: int = 1000
    # Values of r, the number of columns of X.
    ranks: tuple[int, ...] = (1, 10, 50, 100)
    # Random problems per rank.
    instances: int = 10
    # W, the number of workers.
    workers: int = 8
    # Steps of every worker.
    iterations: int = 49
    # η. It must shrink as 1 / dimension.
    learning_rate: float = 5e-4
    # The pull of each iteration. EASGD's β is W times as large.
    pull: float = 1e-4

    def __post_init__(self):
        super().__post_init__()
        for name in ("dimension", "instances", "workers", "iterations"):
            lj.checks.check_positive_int(name, getattr(self, name))
        lj.checks.check_not_negative("learning_rate", self.learning_rate)
        lj.checks.check_fraction("pull", self.pull)
        lj.checks.check_fraction("pull x workers", self.pull * self.workers)
        for rank in self.ranks:
            if not 1 <= rank <= self.dimension:
                most = f"1..{self.dimension} (the dimension)"
                raise ValueError(f"`ranks` must lie in {most}, got {rank}")


OPTIONS = CompletionOptions


def curves_of(options: CompletionOptions) -> Curves:
    """Returns F of the best worker at 0, 1, … iterations, for every rank and method.

    Both methods solve the same problems and pull a worker by the same α; EASGD's β is αW.
    A value is nan only where F of every worker is.
    """
    rate = options.learning_rate
    pull = options.pull
    curves = {}

    def value_and_grad(x, k, *u):
        return loss_and_grad(x, Problem(*u))

    def loss_before(before, after, loss):
        return loss

    count = options.iterations + 1
    methods = {"LGD": lgd(rate, pull), "EASGD": easgd(rate, pull * options.workers)}
    for rank in dict.fromkeys(options.ranks):
        draw = np.random.default_rng([options.seed, rank]).standard_normal
        u = draw((options.instances, options.dimension, rank))
        starts = draw((options.instances, options.workers, options.dimension, rank))
        for method, tx in methods.items():
            began = time.monotonic()
            run = descent(lambda *_, tx=tx: tx, value_and_grad, count, loss_before)
            losses, _ = run(starts, problem_of(u))
            curves[rank, method] = curve = np.fmin.reduce(losses, axis=1)
            print(
                f"rank {rank}, {method}: F = {np.median(curve[:, -1]):.3g} at iteration "
                f"{options.iterations}, {time.monotonic() - began:.1f} s",
                flush=True,
            )
    return curves


def summarize(curves: Curves) -> list[dict[str, Any]]:
    """Returns a row per rank and method: F at the end, and when it fell below 1e-7.

    >>> (row,) = summarize({(1, "LGD"): np.array([[4.0, 1e-8], [2.0, 1e-9]])})
    >>> row["F at iteration 1, median"], row["iterations to F < 1e-07, median"]
    ('5.5e-09', '1')
    """
    rows = []
    for (rank, method), curve in curves.items():
        last = curve.shape[1] - 1
        below = np.minimum.accumulate(curve, axis=1) < SMALL
        when = np.where(below[:, -1], below.argmax(axis=1), np.inf)
        middle = np.median(when)
        rows.append(
            {
                "rank": rank,
                "method": method,
                "instances": len(curve),
                f"F at iteration {last}, median": f"{np.median(curve[:, -1]):.3g}",
                "lowest": f"{curve[:, -1].min():.3g}",
                "highest": f"{curve[:, -1].max():.3g}",
                f"iterations to F < {SMALL:.0e}, median": (
                    f"{middle:.0f}" if np.isfinite(middle) else "–"
                ),
            }
        )
    return rows


def points(curves: Curves) -> list[dict[str, Any]]:
    """Returns a row for every value of the curves."""
    return [
        {"rank": rank, "method": method, "instance": i, "iteration": t, "F": float(value)}
        for (rank, method), curve in curves.items()
        for (i, t), value in np.ndenumerate(curve)
    ]


def draw(curves: Curves) -> Any:
    """Draws the median and the range of F over the iterations, a panel per rank."""
    ranks = list(dict.fromkeys(rank for rank, _ in curves))
    count = len(next(iter(curves.values())))
    figure, panels = plt.subplots(
        1,
        len(ranks),
        figsize=(2.2 + 2.6 * len(ranks), 3.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    styles = {"LGD": (BLUE, "-"), "EASGD": (ORANGE, "--")}
    for (rank, method), curve in curves.items():
        axes = panels[0][ranks.index(rank)]
        color, line = styles[method]
        curve = np.where(curve < LARGE, curve, np.nan)  # diverged values are not drawn
        iteration = np.arange(curve.shape[1])
        lowest = curve.min(axis=0)
        highest = curve.max(axis=0)
        axes.fill_between(iteration, lowest, highest, color=color, alpha=0.25, lw=0)
        axes.plot(iteration, np.median(curve, axis=0), line, color=color, label=method)
        axes.set(yscale="log", xlabel="iteration")
        axes.set_title(f"rank {rank}", fontsize=11)
    panels[0][0].set_ylabel("F of the best worker")
    panels[0][0].legend(frameon=False, loc="lower left")
    figure.suptitle(f"median and range of {count} instances", fontsize=11)
    return figure


def run(options: CompletionOptions) -> output.Results:
    """Runs the experiment."""
    curves = curves_of(options)
    table = summarize(curves)
    text = tables.markdown(table)
    rows = {"curves": points(curves), "table": table}
    return output.Results(text, rows, {"table": text}, {"curves": draw(curves)})
