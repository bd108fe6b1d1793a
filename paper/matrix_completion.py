"""Low-rank matrix completion: LGD converges linearly, EASGD stalls.

    python -m paper matrix-completion --out DIR

minimizes F(X) = ¼‖XXᵀ − UUᵀ‖² over X [d, r] with 8 workers, for several ranks r, on 10
instances each: U and the workers' starts X_0 have entries N(0, 1), gradients are full,
in float64. DIR gets F of the best worker against the iteration (`curves.png`,
`curves.csv`) and a table (`table.md`, `table.csv`). Two minutes on 2 CPU cores.

Settings: learning rate 5e-4; every iteration pulls by 1e-4 to the leader (LGD) or to the
center (EASGD, β = 8e-4, the center starts as the mean of the starts).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
import rich.console
import rich.progress
from matplotlib import pyplot as plt

import lsgd_jax as lj
from paper import output
from paper.factorization import loss_and_grad, problem_of
from paper.instances import Instances, step_of
from paper.methods import easgd, lgd
from train.arguments import Parser
from train.metrics import tables
from train.plots import BLUE, ORANGE


SMALL, LARGE = 1e-7, 1e30
Curves = dict[tuple[int, str], np.ndarray]  # (rank, method) -> [instances, iterations]


def best_of(values: np.ndarray) -> np.ndarray:
    """The best worker's F; nan only where no worker has any."""
    return np.fmin.reduce(values, axis=1)


def descend(
    tx: optax.GradientTransformationExtraArgs,
    u: np.ndarray,
    starts: np.ndarray,
    iterations: int,
) -> Iterator[np.ndarray]:
    """Runs all instances together; yields F of the best workers at 0, 1, … iterations.

    Args:
      tx: the method.
      u: U [instances, d, r].
      starts: X_0 [instances, W, d, r].
      iterations: the last one.

    Yields:
      float64 [instances], `iterations` + 1 times.
    """
    instances = Instances(*starts.shape[:2])
    problem = instances.share_out(problem_of(u))
    x = instances.put(starts)
    state = instances.map(tx.init)(x)
    step = instances.map(step_of(tx, loss_and_grad), donate=(0, 1))
    for _ in range(iterations + 1):
        x, state, values = step(x, state, problem)
        yield best_of(instances.fetch(values))


def methods_of(options: Any) -> dict[str, optax.GradientTransformationExtraArgs]:
    """Both methods, with the same pull α of a worker: EASGD's β is αW."""
    rate, pull = options.learning_rate, options.pull
    return {"LGD": lgd(rate, pull), "EASGD": easgd(rate, pull * options.workers)}


def run(options: Any, tick: Callable, say: Callable) -> Curves:
    """F of the best worker for every rank and method; the same problems for both."""
    curves = {}
    for rank in options.ranks:
        draw = np.random.default_rng([options.seed, rank]).standard_normal
        u = draw((options.instances, options.dimension, rank))
        starts = draw((options.instances, options.workers, options.dimension, rank))
        for method, tx in methods_of(options).items():
            began, curve = time.monotonic(), []
            for best in descend(tx, u, starts, options.iterations):
                curve.append(best)
                tick(f"rank {rank}, {method}")
            curves[rank, method] = np.stack(curve, axis=1)
            say(
                f"rank {rank}, {method}: F = {np.median(best):.3g} at iteration "
                f"{options.iterations}, {time.monotonic() - began:.1f} s"
            )
    return curves


def run_on_screen(options: Any) -> Curves:
    """`run`, with a bar on a terminal and a line for every rank and method."""
    console = rich.console.Console(highlight=False)
    total = len(options.ranks) * len(methods_of(options)) * (options.iterations + 1)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TimeRemainingColumn(compact=True),
    )
    silent = not console.is_terminal
    with rich.progress.Progress(*columns, console=console, disable=silent) as bar:
        task = bar.add_task("compiling", total=total)
        tick = lambda text: bar.update(task, advance=1, description=text)
        return run(options, tick, lambda text: console.print(text, soft_wrap=True))


def summarize(curves: Curves) -> list[dict[str, Any]]:
    """A row per rank and method: F at the end, and when it fell below 1e-7.

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
    """A row for every value of the curves."""
    return [
        {"rank": rank, "method": method, "instance": i, "iteration": t, "F": float(value)}
        for (rank, method), curve in curves.items()
        for (i, t), value in np.ndenumerate(curve)
    ]


def draw(curves: Curves) -> Any:
    """F against the iteration, a panel per rank: median, and lowest to highest."""
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
        axes, (color, line) = panels[0][ranks.index(rank)], styles[method]
        curve = np.where(curve < LARGE, curve, np.nan)  # what has diverged is not drawn
        iteration = np.arange(curve.shape[1])
        lowest, highest = curve.min(axis=0), curve.max(axis=0)
        axes.fill_between(iteration, lowest, highest, color=color, alpha=0.25, lw=0)
        axes.plot(iteration, np.median(curve, axis=0), line, color=color, label=method)
        axes.set(yscale="log", xlabel="iteration")
        axes.set_title(f"rank {rank}", fontsize=11)
    panels[0][0].set_ylabel("F of the best worker")
    panels[0][0].legend(frameon=False, loc="lower left")
    figure.suptitle(f"median and range of {count} instances", fontsize=11)
    return figure


def ranks_of(text: str) -> list[int]:
    """Integers separated by commas.

    >>> ranks_of("1,10")
    [1, 10]
    """
    ranks = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            rule = "`ranks` must be integers separated by commas"
            raise ValueError(f"{rule}, got ranks={text!r}")
        ranks.append(int(part))
    return list(dict.fromkeys(ranks))


def parse(arguments: Sequence[str]) -> Any:
    """The options.

    Raises:
      ValueError: an unknown option, or a value out of range.
    """
    parser = Parser("python -m paper matrix-completion", __doc__)
    add = lambda name, default, text: parser.add_argument(
        name, type=type(default), default=default, help=f"{text} (default: {default})"
    )
    add("--dimension", 1000, "d, the rows of X")
    add("--ranks", "1,10,50,100", "r, the columns of X; several, separated by commas")
    add("--instances", 10, "random problems per rank")
    add("--workers", 8, "W")
    add("--iterations", 49, "steps of every worker")
    add("--learning-rate", 5e-4, "η; goes as 1 / dimension")
    add("--pull", 1e-4, "of each iteration; EASGD's β is this times W")
    add("--seed", 0, "of the problems")
    output.add_out(parser, "matrix-completion")
    options = parser.parse_args(arguments)
    options.ranks = ranks_of(options.ranks)
    for name in ("dimension", "instances", "workers", "iterations"):
        lj.checks.check_positive_int(name, getattr(options, name))
    lj.checks.check_not_negative("learning_rate", options.learning_rate)
    lj.checks.check_not_negative("seed", options.seed)
    lj.checks.check_fraction("pull", options.pull)
    lj.checks.check_fraction("pull x workers", options.pull * options.workers)
    for rank in options.ranks:
        if not 1 <= rank <= options.dimension:
            raise ValueError(
                f"`ranks` must lie in 1..{options.dimension} (the dimension), got {rank}"
            )
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment."""
    options = parse(arguments)
    out = output.new_folder(options.out, "matrix-completion")
    with jax.enable_x64(True):
        curves = run_on_screen(options)
    table = summarize(curves)
    tables.write_csv(points(curves), out / "curves.csv")
    tables.write_csv(table, out / "table.csv")
    text = tables.markdown(table)
    (out / "table.md").write_text(text, encoding="utf-8")
    output.save(draw(curves), out / "curves.png")
    print(f"{text}everything is in {out}")
    return 0
