"""python -m train.compare: several methods under the same budget and data, side by side.

    python -m train.compare digits --methods lsgd,easgd,local-sgd --seeds 3 --out DIR

trains each method with seeds 0, 1, …; all other options are those of `python -m train` and
hold for every method. DIR gets a run folder for each, `compare.png` (test error of the
centre against steps, seconds and bytes sent), `compare.csv` and `compare.md` (mean ±
standard deviation over the seeds). The same command goes on where an interrupted one
stopped.
"""

import argparse
import csv
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from matplotlib import pyplot as plt
from matplotlib.ticker import ScalarFormatter

from train import cli, devices, records, run_folder
from train.config import Config
from train.figures import tidy
from train.loop import Run
from train.methods import find


class Curve(NamedTuple):
    """The tests of one run: what the figure and the table are made of."""

    steps: list[int]
    seconds: list[float]
    megabytes: list[float]
    errors: list[float]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: Sequence[str]) -> tuple[dict[tuple[str, int], Config], pathlib.Path]:
    """The configuration of every (method, seed), and the folder for it all.

    Raises:
      ValueError: an unknown method, no method, fewer than one seed.
    """
    parser = _Parser(
        prog="python -m train.compare", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("experiment", help="a named experiment, such as digits")
    parser.add_argument("--methods", required=True, help="names, joined by commas")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds each")
    parser.add_argument("--out", required=True, help="the folder for runs and results")
    options, others = parser.parse_known_args(arguments)
    if options.seeds < 1:
        raise ValueError(f"`seeds` must be a positive int, got seeds={options.seeds}")
    for name in ("--resume", "--run-dir", "--method", "--seed"):
        if any(given.partition("=")[0] == name for given in others):
            raise ValueError(f"{name} is set by the comparison; leave it out")
    out = pathlib.Path(options.out)
    configs = {}
    for method in options.methods.split(","):
        find(method)
        for seed in range(options.seeds):
            folder = out / f"{method}-{seed}"
            command = [options.experiment, "--method", method, "--seed", str(seed)]
            command += ["--run-dir", str(folder), *others]
            if (folder / run_folder.CHECKPOINTS).exists():
                command.append("--resume")
            configs[method, seed] = cli.parse(command)
    return configs, out


def train(config: Config) -> bool:
    """Trains, or goes on, unless the run has ended; whether it may be counted."""
    assert config.run_dir is not None
    folder = pathlib.Path(config.run_dir)
    if config.resume and _ended(folder, config.steps):
        return True
    result = Run(config).train()
    return result.stopped_by is None


def _ended(folder: pathlib.Path, steps: int) -> bool:
    tests = records.read(folder).get("test", [])
    return bool(tests) and tests[-1]["step"] == steps


def read(folder: pathlib.Path) -> Curve:
    """The tests of a run folder."""
    tests = records.read(folder)["test"]
    column = lambda name: [event[name] for event in tests]
    megabytes = [sent / 1e6 for sent in column("bytes_sent")]
    return Curve(column("step"), column("seconds"), megabytes, column("center_error"))


def summarize(curves: dict[tuple[str, int], Curve]) -> list[dict[str, Any]]:
    """A row per method: the error at the end and at its lowest, seconds, bytes.

    >>> curve = Curve([1, 2], [0.5, 1.0], [0.0, 8.0], [50.0, 10.0])
    >>> (row,) = summarize({("lsgd", 0): curve})
    >>> row["method"], row["test error, %"], row["MB sent per worker"]
    ('lsgd', '10.00', '8.0')
    """
    rows = []
    for method in dict.fromkeys(method for method, _ in curves):
        runs = [curve for (name, _), curve in curves.items() if name == method]
        rows.append(
            {
                "method": method,
                "seeds": len(runs),
                "test error, %": _spread([run.errors[-1] for run in runs], 2),
                "lowest, %": _spread([min(run.errors) for run in runs], 2),
                "training time, s": _spread([run.seconds[-1] for run in runs], 1),
                "MB sent per worker": _spread([run.megabytes[-1] for run in runs], 1),
            }
        )
    return rows


def _spread(numbers: list[float], digits: int) -> str:
    mean = f"{statistics.mean(numbers):.{digits}f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}"


def write(rows: list[dict[str, Any]], out: pathlib.Path) -> str:
    """Writes compare.csv and compare.md; the latter's text."""
    with open(out / "compare.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    text = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
    (out / "compare.md").write_text(text)
    return text


def draw(curves: dict[tuple[str, int], Curve], path: pathlib.Path) -> None:
    """Test error of the centre against steps, seconds and bytes; a line per run."""
    figure, panels = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    methods = list(dict.fromkeys(method for method, _ in curves))
    colors = plt.get_cmap("tab10" if len(methods) <= 10 else "tab20")
    for (method, seed), curve in curves.items():
        label = method if seed == 0 else None
        style = {"color": colors(methods.index(method)), "lw": 1.4, "label": label}
        for axes, x in zip(panels, (curve.steps, curve.seconds, curve.megabytes)):
            axes.plot(x, curve.errors, **style)
    labels = ("step", "training time, s", "MB sent per worker")
    for axes, label in zip(panels, labels):
        axes.set_xlabel(label)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
    panels[2].set_xscale("symlog")  # a method may send nothing
    panels[2].set_xlim(left=0)
    panels[0].set_ylabel("test error of the centre, %")
    panels[0].legend(frameon=False)
    tidy(figure).savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Compares; the exit status is 0, 1 (a run did not end), 2 (wrong usage)."""
    try:
        configs, out = parse(arguments)
        first = next(iter(configs.values()))
        devices.provide(first.workers.nodes * first.workers.locals)
        for config in configs.values():
            if not train(config):
                print(f"stopped; the same command goes on from {out}", file=sys.stderr)
                return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    curves = {(method, seed): read(out / f"{method}-{seed}") for method, seed in configs}
    print(write(summarize(curves), out), end="")
    draw(curves, out / "compare.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
