"""python -m train.compare: several methods under the same budget and data, side by side.

    python -m train.compare digits --methods lsgd,easgd,local-sgd --seeds 3 --out DIR

trains each method with seeds 0, 1, …; all other options are those of `python -m train` and
hold for every method. `--variant NAME=OPTIONS`, as often as you like, adds a method with
options of its own:

    --variant "often=--method lsgd --method.local-period 4"

DIR gets a run folder for each, `compare.png` (test error or validation loss of the center
against steps, seconds and bytes sent), `compare.csv` and `compare.md` (mean ± standard
deviation over the seeds), and `compare.json` (the tests of each seed). The same command
resumes an interrupted comparison.
"""

import json
import math
import pathlib
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.ticker import ScalarFormatter

import lsgd_jax as lj
from train import cli, compilation_cache
from train.arguments import Parser
from train.cluster import devices, rendezvous
from train.cluster.exit_status import STOPPED, SUCCESS, WRONG_USAGE
from train.cluster.session import Session, WorkersLost
from train.config import FREE_ON_RESUME, WORKERS, Config
from train.metrics import log as records
from train.metrics import tables, traffic
from train.metrics.measures import ERROR, Measure, of_events
from train.metrics.plots import tidy
from train.run import folder as run_folder
from train.run import loop
from train.run.open import open_run
from train.run.result import NONFINITE
from train.task.methods import find


class Curve(NamedTuple):
    """The tests of one run: what the figure and the table are made of.

    values: of the center, by the measure; inf at the end of a run that has diverged.
    peak_megabytes: the most that a worker has sent at a step; None if that is not known.
    """

    steps: list[int]
    seconds: list[float]
    megabytes: list[float]
    values: list[float]
    measure: Measure = ERROR
    peak_megabytes: float | None = None


def parse(arguments: Sequence[str]) -> tuple[dict[tuple[str, int], Config], pathlib.Path]:
    """The configuration of every (method or variant, seed), and the folder for it all.

    Raises:
      ValueError: an unknown method, no method, a variant without a name or with one that
        is taken, fewer than one seed.
    """
    parser = Parser("python -m train.compare", __doc__)
    parser.add_argument("experiment", help="a named experiment, such as digits")
    parser.add_argument("--methods", default="", help="names, joined by commas")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=OPTIONS",
        help="a method with options of its own",
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds each")
    parser.add_argument("--out", required=True, help="the folder for runs and results")
    options, others = parser.parse_known_args(arguments)
    check_left_out(others, "--method")
    commands = {}
    for method in filter(None, options.methods.split(",")):
        find(method)
        commands[method] = [options.experiment, "--method", method, *others]
    for variant in options.variant:
        name, _, own = variant.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or name in commands:
            raise ValueError(
                f"`variant` must be NAME=OPTIONS with a name of its own, got {variant!r}"
            )
        check_left_out(shlex.split(own))
        commands[name] = [options.experiment, *others, *shlex.split(own)]
    if not commands:
        raise ValueError("`methods` or `variant` must name what to compare")
    out = pathlib.Path(options.out)
    return of_seeds(commands, options.seeds, out), out


def check_left_out(arguments: Sequence[str], *more: str) -> None:
    """Raises ValueError if a command line has options that a comparison sets itself."""
    for name in ("--resume", "--run-dir", "--seed", *more):
        if any(given.partition("=")[0] == name for given in arguments):
            raise ValueError(f"{name} is set by the comparison; leave it out")


def of_seeds(
    commands: dict[str, list[str]], seeds: int, out: pathlib.Path
) -> dict[tuple[str, int], Config]:
    """The configurations of some commands with seeds 0, 1, …, each with a run folder.

    Raises:
      ValueError: fewer than one seed, a command that is not possible, or a run that began
        with other settings, workers included: they would not be compared fairly.
    """
    lj.checks.check_positive_int("seeds", seeds)
    free = FREE_ON_RESUME - WORKERS
    configs = {}
    for name, command in commands.items():
        for seed in range(seeds):
            folder = out / f"{name}-{seed}"
            arguments = [*command, "--seed", str(seed), "--run-dir", str(folder)]
            if (folder / run_folder.CHECKPOINTS).exists():
                arguments.append("--resume")
            configs[name, seed] = config = cli.parse(arguments)
            if config.resume:
                run_folder.check_same_experiment(config, folder, free)
    return configs


def join(configs: dict[tuple[str, int], Config]) -> Session:
    """Joins the other processes, with devices for the run that has the most workers.

    Raises:
      ValueError: there are others, and methods at own pace are to be compared.
    """
    most = max(configs.values(), key=lambda c: c.workers.devices)
    chosen = [config.method for config in configs.values()]
    on_ray = [method.name for method in chosen if method.is_asynchronous]
    if len(on_ray) == len(configs):
        devices.leave_to_workers()
        return Session()
    session = rendezvous.join(most)
    if on_ray and session.has_others:
        raise ValueError(
            "`methods` must be in lock step with several processes, got "
            f"{on_ray[0]}, whose workers are processes of Ray"
        )
    return session


def run(
    configs: dict[tuple[str, int], Config], out: pathlib.Path, session: Session
) -> dict[tuple[str, int], Curve] | None:
    """Trains whatever has not ended yet; the tests of all, or None if a run was stopped."""
    for config in configs.values():
        if not train(config, session):
            print(f"stopped; the same command resumes it in {out}", file=sys.stderr)
            return None
    return {(name, seed): read(out / f"{name}-{seed}") for name, seed in configs}


def train(config: Config, session: Session) -> bool:
    """Trains or resumes, unless the run has ended; whether it has then, also diverged."""
    assert config.run_dir is not None
    folder = pathlib.Path(config.run_dir)
    if config.resume and _ended(folder, config.steps):
        return True
    run = open_run(config, session)
    result = loop.train(run)
    if run.lock is not None:
        run.lock.release()
    return result.stopped_by in (None, NONFINITE)


def _ended(folder: pathlib.Path, steps: int) -> bool:
    if not (folder / records.METRICS).exists():
        return False  # it was killed before its first line
    events = records.read(folder)
    tests = events.get("test", [])
    return bool(tests) and tests[-1]["step"] == steps or _has_diverged(events)


def _has_diverged(events: dict[str, list[dict[str, Any]]]) -> bool:
    """Whether a run was given up because no loss was finite any more."""
    ends = events.get("end", [])
    return bool(ends) and ends[-1].get("stopped_by") == NONFINITE


def read(folder: pathlib.Path) -> Curve:
    """The tests of a run folder; ValueError if it says nothing of them."""
    events = records.read(folder)
    tests = events.get("test", [])
    measure = of_events(tests)
    known = {f"center_{measure.key}", "bytes_sent"}
    tests = [test for test in tests if known <= test.keys()]
    if _has_diverged(events):
        last = {"bytes_sent": 0} | events.get("train", [{}])[-1] | events["end"][-1]
        tests.append(last | {f"center_{measure.key}": math.inf})
    if not tests:
        raise ValueError(f"{folder / records.METRICS} holds no test")
    column = lambda name: [event[name] for event in tests]
    megabytes = [sent / 1e6 for sent in column("bytes_sent")]
    values = column(f"center_{measure.key}")
    sent = traffic.of_run(events.get("train", []))
    peak = None if sent is None else float(sent.max() / 1e6)
    return Curve(column("step"), column("seconds"), megabytes, values, measure, peak)


def summarize(curves: dict[tuple[str, int], Curve]) -> list[dict[str, Any]]:
    """A row per method: the error at the end and at its lowest, seconds, bytes.

    >>> curve = Curve([1, 2], [0.5, 1.0], [0.0, 8.0], [50.0, 10.0])
    >>> (row,) = summarize({("lsgd", 0): curve})
    >>> row["method"], row["test error, %"], row["MB sent per worker"]
    ('lsgd', '10.00', '8.0')
    """
    rows = []
    # A run that diverged before its first test does not say what it would have measured.
    finite = lambda curve: any(map(math.isfinite, curve.values))
    measure = next((x.measure for x in curves.values() if finite(x)), ERROR)
    for method in dict.fromkeys(method for method, _ in curves):
        runs = [curve for (name, _), curve in curves.items() if name == method]
        digits = measure.digits
        rows.append(
            {
                "method": method,
                "seeds": len(runs),
                measure.label: spread([run.values[-1] for run in runs], digits),
                f"lowest, {measure.unit}": spread([min(x.values) for x in runs], digits),
                "training time, s": spread([run.seconds[-1] for run in runs], 1),
                "MB sent per worker": spread([run.megabytes[-1] for run in runs], 1),
                "peak MB in a step": _peak(runs),
            }
        )
    return rows


def _peak(runs: Sequence[Curve]) -> str:
    """The most that a worker has sent at a step, which is the same with every seed."""
    known = [x.peak_megabytes for x in runs if x.peak_megabytes is not None]
    return f"{max(known):.3g}" if known else "–"


def spread(numbers: Sequence[float], digits: int) -> str:
    """The mean ± standard deviation; of a single number itself; of inf that it diverged.

    >>> spread([1.0, 2.0, 3.0], 1), spread([1.0], 2)
    ('2.0 ± 1.0', '1.00')
    """
    if not all(map(math.isfinite, numbers)):
        return "diverged"
    mean = f"{statistics.mean(numbers):.{digits}f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}"


def write(rows: list[dict[str, Any]], out: pathlib.Path, name: str = "compare") -> str:
    """Writes rows as NAME.csv and NAME.md; the latter's text."""
    tables.write_csv(rows, out / f"{name}.csv")
    text = tables.markdown(rows)
    (out / f"{name}.md").write_text(text)
    return text


def _known(values: Sequence[float]) -> list[float | None]:
    """The same for JSON, which has no word for what is not finite."""
    return [value if math.isfinite(value) else None for value in values]


AGAINST = {
    "steps": "step",
    "seconds": "training time, s",
    "megabytes": "MB sent per worker",
}


def draw(
    curves: dict[tuple[str, int], Curve],
    path: pathlib.Path,
    against: Sequence[str] = tuple(AGAINST),
) -> None:
    """What was measured of the center against steps, seconds and bytes; a line per run."""
    size = 3.5 * len(against) + 2.5, 4
    figure, panels = plt.subplots(
        1, len(against), figsize=size, sharey=True, layout="constrained"
    )
    methods = list(dict.fromkeys(method for method, _ in curves))
    colors = plt.get_cmap("tab10" if len(methods) <= 10 else "tab20")
    for (method, seed), curve in curves.items():
        label = method if seed == 0 else None
        style = {"color": colors(methods.index(method)), "lw": 1.4, "label": label}
        for axes, name in zip(panels, against):
            axes.plot(getattr(curve, name), curve.values, **style)
    for axes, name in zip(panels, against):
        axes.set_xlabel(AGAINST[name])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        if name == "megabytes":
            axes.set_xscale("symlog")  # a method may send nothing
            axes.set_xlim(left=0)
    measure = next(iter(curves.values())).measure
    panels[0].set_ylabel(f"{measure.name} of the center, {measure.unit}")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False
    )
    tidy(figure).savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Compares; the exit status is 0, 1 (a run did not end), 2 (wrong usage)."""
    session = Session()
    try:
        configs, out = parse(arguments)
        session = join(configs)
        compilation_cache.use(say=session.is_main)
        curves = run(configs, out, session)
    except ValueError as error:
        return session.leave(WRONG_USAGE, str(error))
    except OSError as error:
        return session.leave(STOPPED, str(error))
    except WorkersLost as error:
        return session.leave(STOPPED, f"{error}; the same command goes on")
    if curves is None:
        return STOPPED
    if not session.is_main:
        return SUCCESS
    tests = [
        {"method": name, "seed": seed, **curve._asdict(), "values": _known(curve.values)}
        for (name, seed), curve in curves.items()
    ]
    try:
        print(write(summarize(curves), out), end="")
        (out / "compare.json").write_text(json.dumps(tests, indent=1) + "\n")
        draw(curves, out / "compare.png")
    except OSError as error:
        return session.leave(STOPPED, f"the results cannot be written: {error}")
    return SUCCESS
