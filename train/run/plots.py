"""The figures of a run, as PNG files in its folder."""

import pathlib
from typing import Any

import numpy as np

from train.config import settings
from train.metrics import log, traffic
from train.metrics.drawing import (
    BLUE,
    GREY,
    ORANGE,
    plain_numbers,
    save,
    subplots,
    whole_numbers,
)
from train.metrics.measures import ERROR, of_events
from train.run.folder import CONFIG


Event = dict[str, Any]
Events = dict[str, list[Event]]

MOST_NAMED = 16  # workers
AT_LEAST_SHOWN = 100  # steps, or two periods if these are longer; traffic is periodic


def draw(folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws training, leaders, consensus, traffic and pace (.png) from a run's metrics.

    Returns:
      The files. Figures without data are left out.
    """
    events = log.read(folder)
    written = []
    for name, make in FIGURES.items():
        figure = make(events)
        if figure is not None:
            figure.suptitle(title(folder), fontsize=10)
            written.append(folder / f"{name}.png")
            save(figure, written[-1])
    return written


def title(folder: pathlib.Path) -> str:
    """The name of a run, with its method if the folder holds a configuration."""
    name = folder.resolve().name
    try:
        return f"{name}: {settings.read_some(folder / CONFIG)['method.name']}"
    except (ValueError, KeyError):
        return name


def _plot(axes: Any, events: list[Event], x: str, y: str, **style: Any) -> None:
    known = [event for event in events if event.get(y) is not None]
    axes.plot([event[x] for event in known], [event[y] for event in known], **style)


def _each_step(train: list[Event], x: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss of the workers at each step that has one: (step or seconds, loss).

    The seconds between two reports are divided evenly among their steps.
    """
    at: list[float] = []
    losses: list[float] = []
    before = {"step": 0, "seconds": 0.0}
    for event in train:
        each = event.get("step_losses") or [event.get("loss")]
        begin = max(before["step"], event["step"] - len(each))
        share = np.arange(1, len(each) + 1) / len(each)
        start = begin if x == "step" else before["seconds"]
        at += (start + share * (event[x] - start)).tolist()
        losses += each
        before = event
    known = [(a, b) for a, b in zip(at, losses) if b is not None]
    places, values = np.array(known, float).reshape(-1, 2).T
    return places, values


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of values around each of them, over a fortieth of all.

    >>> smoothed(np.arange(80.0))[:4].tolist()
    [0.5, 1.0, 2.0, 3.0]
    """
    window = np.ones(2 * (len(values) // 80) + 1)
    total = np.convolve(values, window, "same")
    return total / np.convolve(np.ones(len(values)), window, "same")


def _training(events: Events) -> Any:
    """Training loss and test results against steps and against seconds."""
    train = events.get("train", [])
    test = events.get("test", [])
    if not train:
        return None
    measure = of_events(test)
    figure, grid = subplots(2, 2, figsize=(9, 6), sharey="row")
    lines = {
        "center": {"color": BLUE, "marker": "o", "ms": 3},
        "best worker": {"color": ORANGE, "marker": "s", "ms": 3, "ls": "--"},
    }
    for (loss, error), x in zip(grid.T, ("step", "seconds")):
        places, losses = _each_step(train, x)
        loss.plot(places, losses, color=BLUE, lw=0.5, alpha=0.35, label="each step")
        loss.plot(places, smoothed(losses), color=BLUE, label="smoothed")
        for label, style in lines.items():
            key = f"{label.split()[0]}_{measure.key}"
            _plot(error, test, x, key, label=label, **style)
        xlabel = "step" if x == "step" else "training time, s"
        loss.set(xlabel=xlabel, ylabel="training loss, mean of workers", yscale="log")
        error.set(xlabel=xlabel, ylabel=measure.label)
    plain_numbers(grid[0][0].yaxis)
    grid[1][0].set_ylim(0 if measure is ERROR else None, None)
    for axes in grid[:, 0]:
        axes.legend(frameon=False)
    return figure


def _grids(events: Events) -> list[tuple[int, int, int, int]]:
    """(first step, last step, nodes, locals) of each grid that a run has had."""
    starts = {event["step"]: event["workers"] for event in events.get("start", [])}
    last = max((event["step"] for kind in events.values() for event in kind), default=0)
    ends = [*list(starts)[1:], last]
    return [(step, end, *grid) for (step, grid), end in zip(starts.items(), ends)]


def _leaders(events: Events) -> Any:
    """The leaders over time (left) and how often each worker led (right), per level."""
    elections = events.get("leaders", [])
    grids = _grids(events)
    levels = [[e for e in elections if e["level"] == level] for level in ("node", "all")]
    shown = list(filter(None, levels))
    if not shown or not grids:
        return None
    size = (9, 1.5 + 2.4 * len(shown))
    rows = len(shown)
    figure, grid = subplots(
        rows, 2, figsize=size, squeeze=False, sharey=True, width_ratios=(3, 1)
    )
    for (when, often), of_level in zip(grid, shown):
        _elections(when, often, of_level, grids)
        when.set_xlim(0, elections[-1]["step"] * 1.02)
    return figure


def _elections(
    when: Any, often: Any, elections: list[Event], grids: list[tuple[int, int, int, int]]
) -> None:
    """The leaders of one level against the steps, and the number of elections won."""
    workers = range(max(nodes * locals for _, _, nodes, locals in grids))
    points = [(e["step"], worker) for e in elections for worker in e["leaders"]]
    steps, leaders = zip(*points)
    when.scatter(steps, leaders, s=14, marker="|", color=BLUE)
    counts = [leaders.count(worker) for worker in workers]
    often.barh(workers, counts, color=BLUE, height=0.7)
    whole_numbers(often.xaxis)
    borders = [np.arange(locals, n * locals, locals) - 0.5 for _, _, n, locals in grids]
    for (begin, end, _, _), between in zip(grids, borders):
        when.hlines(between, begin, end, color=GREY, lw=0.8)
    for border in borders[-1]:
        often.axhline(border, color=GREY, lw=0.8)
    is_node = elections[0]["level"] == "node"
    whose = "leader of each node" if is_node else "leader of all"
    changes = sum(a["leaders"] != b["leaders"] for a, b in zip(elections, elections[1:]))
    summary = f"{whose}: {changes} changes in {len(elections)} elections"
    when.set_title(summary, fontsize=10)
    when.set(xlabel="step", ylabel="worker", yticks=workers)
    often.set(xlabel="elections won", ylabel="worker")


def _consensus(events: Events) -> Any:
    """The distance between the workers, around exchanges if there are some."""
    train = events.get("train", [])
    if not any(event.get("consensus_distance") for event in train):
        return None
    figure, axes = subplots(figsize=(6, 3.4))
    exchanges = [e["exchange"] for e in train if e.get("exchange")]
    around = [(step, x, y) for step, x, y in exchanges if x is not None]
    if around:
        steps, before, after = zip(*around)
        axes.vlines(steps, before, after, color=GREY, lw=0.6)
        axes.plot(steps, before, ".-", color=ORANGE, label="before an exchange")
        axes.plot(steps, after, ".-", color=BLUE, label="after it")
        axes.legend(frameon=False)
    else:
        _plot(axes, train, "step", "consensus_distance", color=BLUE)
    axes.set(xlabel="step", ylabel="mean ‖x_i − x̄‖ / ‖x̄‖", ylim=(0, None))
    return figure


def _traffic(events: Events) -> Any:
    """The bytes that a worker sends at each step, their peak and their mean."""
    train = events.get("train", [])
    sent = traffic.of_run(train)
    if sent is None or not sent.any():
        return None
    megabytes = sent / 1e6
    longest = max(every for event in train for every, *_ in event.get("pulls", []))
    shown = min(len(sent), max(2 * longest, AT_LEAST_SHOWN))
    figure, axes = subplots(figsize=(9, 3))
    style = {"color": BLUE, "edgecolor": BLUE, "lw": 0.8}
    axes.bar(np.arange(1, shown + 1), megabytes[:shown], **style)
    peak = megabytes.max()
    mean = megabytes.mean()
    axes.axhline(mean, color=ORANGE, lw=1)
    which = "all" if shown == len(sent) else f"the first {shown} of {len(sent)}"
    title = f"{which} steps; peak {peak:.3g} MB in a step, mean {mean:.3g} MB a step"
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="step", ylabel="MB sent per worker", xlim=(0, shown + 1))
    return figure


def _pace(events: Events) -> Any:
    """The progress of each asynchronous worker, and the fraction of time it waited."""
    last = events.get("pace", [{"steps": []}])[-1]
    workers = range(len(last["steps"]))
    known = [e for e in events.get("pace", []) if len(e["steps"]) == len(workers)]
    if not workers:
        return None
    figure, (far, wait) = subplots(1, 2, figsize=(9, 3.4), width_ratios=(3, 1))
    for i in workers:
        line = [(event["seconds"], event["steps"][i]) for event in known]
        far.plot(*zip(*line), lw=1.2, label=str(i))
    shares = [100 * waited / max(last["seconds"], 1e-9) for waited in last["waited"]]
    wait.barh(workers, shares, color=BLUE, height=0.7)
    far.set(xlabel="training time, s", ylabel="steps of each worker")
    wait.set(xlabel="time waited, %", ylabel="worker")
    if len(workers) <= MOST_NAMED:
        far.legend(frameon=False, title="worker", ncols=2)
        wait.set_yticks(workers)
    return figure


FIGURES = {
    "training": _training,
    "leaders": _leaders,
    "consensus": _consensus,
    "traffic": _traffic,
    "pace": _pace,
}
