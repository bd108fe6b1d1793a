"""The figures of a run, as PNG files beside its metrics: python -m train.plots RUN."""

import pathlib
import sys
from typing import Any, NamedTuple

import matplotlib
import numpy as np

from train import command
from train.metrics import log, traffic
from train.metrics.measures import ERROR, of_events


matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402


Events = dict[str, list[dict[str, Any]]]

BLUE, ORANGE, GREY = "#2566a8", "#d9731a", "#9aa0a6"
MOST_NAMED = 16  # workers
AT_LEAST_SHOWN = 100  # steps; two periods if they are longer: all others are like these


def draw(folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws training, leaders, consensus, traffic and pace (.png) from a run's metrics.

    Returns:
      The files written; figures for which there is no data yet are left out.
    """
    events = log.read(folder)
    figures = {
        "training.png": _training(events),
        "leaders.png": _leaders(events),
        "consensus.png": _consensus(events),
        "traffic.png": _traffic(events),
        "pace.png": _pace(events),
    }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=120)
            plt.close(figure)
            written.append(folder / name)
    return written


def _column(events: list[dict[str, Any]], name: str) -> list[Any]:
    return [event.get(name) for event in events]


def _plot(axes: Any, events: list[dict[str, Any]], x: str, y: str, **style: Any) -> None:
    known = [event for event in events if isinstance(event.get(y), int | float)]
    axes.plot(_column(known, x), _column(known, y), **style)


def _training(events: Events) -> Any:
    """Training loss and what tests measured against steps and against seconds."""
    train, test = events.get("train", []), events.get("test", [])
    if not train:
        return None
    measure = of_events(test)
    figure, grid = plt.subplots(2, 2, figsize=(9, 6), sharey="row", layout="constrained")
    for column, (x, label) in enumerate(
        (("step", "step"), ("seconds", "training time, s"))
    ):
        loss, error = grid[0][column], grid[1][column]
        _plot(loss, train, x, "loss", color=BLUE)
        style = {"color": BLUE, "marker": "o", "ms": 3}
        _plot(error, test, x, f"center_{measure.key}", **style, label="center")
        style = {"color": ORANGE, "marker": "s", "ms": 3, "ls": "--"}
        _plot(error, test, x, f"best_{measure.key}", **style, label="best worker")
        loss.set_yscale("log")
        if measure is ERROR:
            error.set_ylim(bottom=0)
        error.set_xlabel(label)
    grid[0][0].set_ylabel("training loss, mean of workers")
    grid[1][0].set_ylabel(measure.label)
    grid[1][0].legend(frameon=False)
    return tidy(figure)


class GridSpan(NamedTuple):
    """Steps of a run that had the same grid of workers."""

    begin: int
    end: int
    nodes: int
    locals: int


def _grids(events: Events) -> list[GridSpan]:
    """The grids of a run that was resumed with other workers, one after another."""
    known = [e for e in events.get("start", []) if _are_ints(e.get("workers"), count=2)]
    starts = {event["step"]: event["workers"] for event in known}
    last = max((event["step"] for kind in events.values() for event in kind), default=0)
    ends = [*list(starts)[1:], last]
    return [GridSpan(step, end, *grid) for (step, grid), end in zip(starts.items(), ends)]


def _leaders(events: Events) -> Any:
    """Which worker led when (left) and how often (right), in its node and of all."""
    elections = [e for e in events.get("leaders", []) if _are_ints(e.get("leaders"))]
    grids = _grids(events)
    levels = [level for level in ("node", "all") if _of_level(elections, level)]
    if not levels or not grids:
        return None
    figure, grid = plt.subplots(
        len(levels),
        2,
        figsize=(9, 1.2 + 2.4 * len(levels)),
        squeeze=False,
        sharey=True,
        width_ratios=(3, 1),
        layout="constrained",
    )
    for (when, often), level in zip(grid, levels):
        _elections(when, often, _of_level(elections, level), grids)
        when.set_xlim(0, elections[-1]["step"] * 1.02)
    grid[-1][0].set_xlabel("step")
    grid[-1][1].set_xlabel("elections won")
    return tidy(figure)


def _elections(
    when: Any, often: Any, elections: list[dict[str, Any]], grids: list[GridSpan]
) -> None:
    """The leaders of one level: against the steps, and how often each was elected."""
    workers = range(max(grid.nodes * grid.locals for grid in grids))
    points = [(e["step"], worker) for e in elections for worker in e["leaders"]]
    steps, leaders = zip(*points)
    when.scatter(steps, leaders, s=14, marker="|", color=BLUE)
    counts = [leaders.count(worker) for worker in workers]
    often.barh(workers, counts, color=BLUE, height=0.7)
    for begin, end, nodes, locals in grids:
        borders = np.arange(locals, nodes * locals, locals) - 0.5
        when.hlines(borders, begin, end, color=GREY, lw=0.8)
    for border in borders:  # of the last grid
        often.axhline(border, color=GREY, lw=0.8)
    is_node = elections[0]["level"] == "node"
    title = "leader of each node" if is_node else "leader of all"
    changes = sum(a["leaders"] != b["leaders"] for a, b in zip(elections, elections[1:]))
    summary = f"{title}: {changes} changes in {len(elections)} elections"
    when.set_title(summary, fontsize=10)
    when.set_ylabel("worker")
    when.set_yticks(workers)


def _of_level(elections: list[dict[str, Any]], level: str) -> list[dict[str, Any]]:
    return [event for event in elections if event.get("level") == level]


def _are_ints(value: Any, count: int | None = None) -> bool:
    """Whether an event has what it must have there: a line of the file may be damaged."""
    is_list = isinstance(value, list) and all(isinstance(x, int) for x in value)
    return is_list and len(value) == (count or len(value))


def _consensus(events: Events) -> Any:
    """How far apart the workers are."""
    train = events.get("train", [])
    if not any(event.get("consensus_distance") for event in train):
        return None
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    _plot(axes, train, "step", "consensus_distance", color=BLUE)
    axes.set_xlabel("step")
    axes.set_ylabel("mean ‖x_i − x̄‖ / ‖x̄‖")
    axes.set_ylim(bottom=0)
    return tidy(figure)


def _traffic(events: Events) -> Any:
    """What a worker sends at each step: of all of them the peak and the mean."""
    train = events.get("train", [])
    sent = traffic.of_run(train)
    if sent is None or not sent.any():
        return None
    megabytes = sent / 1e6
    longest = max(every for event in train for every, *_ in event.get("pulls", []))
    shown = min(len(sent), max(2 * longest, AT_LEAST_SHOWN))
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    steps = np.arange(1, shown + 1)
    axes.bar(steps, megabytes[:shown], color=BLUE, edgecolor=BLUE, lw=0.8)
    peak, mean = megabytes.max(), megabytes.mean()
    axes.axhline(mean, color=ORANGE, lw=1)
    axes.set_title(f"peak {peak:.3g} MB in a step, mean {mean:.3g} MB a step", fontsize=10)
    axes.set_xlabel("step" if shown == len(sent) else f"step (of {len(sent)})")
    axes.set_ylabel("MB sent per worker")
    axes.set_xlim(0, shown + 1)
    return tidy(figure)


def _pace(events: Events) -> Any:
    """How far each worker at its own pace was, and which part of the time it waited."""
    count = max((len(e.get("steps") or ()) for e in events.get("pace", [])), default=0)
    known = [e for e in events.get("pace", []) if _are_numbers(e, count)]
    if not known:
        return None
    figure, (far, wait) = plt.subplots(
        1, 2, figsize=(9, 3.4), width_ratios=(3, 1), layout="constrained"
    )
    seconds = _column(known, "seconds")
    for i in range(count):
        far.plot(seconds, [event["steps"][i] for event in known], lw=1.2, label=str(i))
    last = known[-1]
    shares = [100 * waited / max(last["seconds"], 1e-9) for waited in last["waited"]]
    wait.barh(range(count), shares, color=BLUE, height=0.7)
    far.set_xlabel("training time, s")
    far.set_ylabel("steps of each worker")
    if count <= MOST_NAMED:
        far.legend(frameon=False, title="worker", ncols=2)
        wait.set_yticks(range(count))
    wait.set_xlabel("time waited, %")
    wait.set_ylabel("worker")
    return tidy(figure)


def _are_numbers(event: dict[str, Any], count: int) -> bool:
    """Whether an event has a number of steps and of seconds waited for each worker."""
    columns = [event.get("steps"), event.get("waited")]
    return all(
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(x, int | float) for x in values)
        for values in columns
    )


def tidy(figure: Any) -> Any:
    """The figure without the frames that say nothing."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def main(arguments: list[str]) -> int:
    """Draws the figures of the run folders named on the command line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m train.plots RUN [RUN ...]: draws the figures of run folders")
        return 0 if arguments else 2
    for argument in arguments:
        try:
            for path in draw(pathlib.Path(argument)):
                print(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"error: {argument} is no run folder: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
