"""python -m train.compare: compares methods on the same data with the same budget.

    python -m train.compare digits --methods lsgd,easgd,local-sgd --seeds 3 --out DIR

The command trains each method with seeds 0, 1, …. All options of `python -m train` may
follow; they apply to every method. `--variant NAME=OPTIONS` adds a method with its own
options:

    --variant "often=--method lsgd --method.local-period 4"

DIR receives a run folder for each run, `compare.png` (test error or validation loss of the
center against steps, seconds and bytes sent), the table as `compare.csv`, `compare.md` and
`compare.tex` (mean ± standard deviation over the seeds), and `compare.json` (the tests of
each seed). Runs with equal seeds see the same data, so the table also has the difference to
the first method, seed by seed. All methods train with seed 0 first, then with seed 1, ….

The same command resumes an interrupted comparison, and tries failed runs again. All methods
are tried without training before the first one trains. A run that fails later is named in
the table, and the others go on. The exit status is 1 if a run diverged or failed.
"""

import dataclasses
import json
import math
import pathlib
import re
import shlex
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import jax
import tyro

import lsgd_jax as lj
from train.cluster import devices, rendezvous
from train.cluster.session import Session, WorkersLost, is_of_xla
from train.config.schema import FREE_ON_RESUME, WORKERS, Config, fields
from train.metrics import log as records
from train.metrics import tables, traffic
from train.metrics.measures import ERROR, Measure, of_events
from train.metrics.quantities import duration
from train.process import command, compilation_cache
from train.process.exit_status import STOPPED, SUCCESS, WRONG_USAGE
from train.process.messages import check_installed, one_line
from train.run import cli, loop
from train.run import folder as run_folder
from train.run.open import open_run
from train.run.result import NONFINITE
from train.task.asynchronous import AsynchronousExperiment
from train.task.datasets import load_dataset
from train.task.experiment import Experiment


class Curve(NamedTuple):
    """The tests of one run.

    values: the measure at the center; inf where its loss was not finite.
    peak_megabytes: the most that a worker sent in one step; None if unknown.
    compile_seconds: time of compilation, which `seconds` do not contain.
    is_far_above_best: whether the run ended far above its best test.
    bleu: BLEU of the center at the end; None for other data than translation.
    """

    steps: list[int]
    seconds: list[float]
    megabytes: list[float]
    values: list[float]
    measure: Measure = ERROR
    peak_megabytes: float | None = None
    compile_seconds: float = 0.0
    is_far_above_best: bool = False
    bleu: float | None = None

    @property
    def diverged(self) -> bool:
        """Whether the last loss was not finite, or the last test far above the best."""
        return self.is_far_above_best or not math.isfinite(self.values[-1])


Key = tuple[str, int]  # method or variant, seed

# Settings on which tests depend: they must be equal in all rows of a table.
EQUAL = (
    "steps",
    "test_every",
    "stop_after_nonfinite",
    "data.name",
    "data.dir",
    "data.files",
    "data.tokens",
    "data.source",
    "data.target",
    "data.subwords",
    "data.context",
)
UNKNOWN = "–"  # a cell of the table without a value


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """The options of a comparison.

    Args:
      experiment: a named experiment, such as digits.
      out: folder for the runs and the results.
      methods: names of methods, separated by commas.
      variant: NAME=OPTIONS, a method with its own options.
      seeds: number of seeds per method.
    """

    experiment: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    out: pathlib.Path
    methods: str = ""
    variant: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    seeds: int = 1


def parse(arguments: Sequence[str]) -> tuple[dict[Key, Config], pathlib.Path]:
    """Returns the configurations of all runs, and the folder for the results.

    Raises:
      ValueError: wrong usage.
    """
    program = "python -m train.compare"
    options, others = cli.run_with_others(CompareOptions, arguments, program, __doc__)
    check_left_out(others, "--method")
    names = filter(None, options.methods.split(","))
    lines: dict[str, list[str]] = {}
    listed = (f"{name.replace(':', '.')}=--method {name}" for name in names)
    for variant in (*listed, *options.variant):
        name, _, text = variant.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or name in lines:
            raise ValueError(
                f"`variant` must be NAME=OPTIONS with a unique name, got {variant!r}"
            )
        own = shlex.split(text)
        check_left_out(own)
        lines[name] = [options.experiment, *others, *own]
    if not lines:
        raise ValueError("`methods` or `variant` must name the methods to compare")
    command = cli.Command(program, CompareOptions)
    configs = of_seeds(lines, options.seeds, options.out, command)
    check_equal(configs, options.out)
    return configs, options.out


def check_left_out(arguments: Sequence[str], *more: str) -> None:
    """Raises ValueError if the arguments contain an option that a comparison sets."""
    for name in ("--resume", "--run-dir", "--seed", *more):
        if any(given.partition("=")[0] == name for given in arguments):
            raise ValueError(f"{name} must be left out, because the comparison sets it")


def of_seeds(
    lines: dict[str, list[str]],
    seeds: int,
    out: pathlib.Path,
    command: cli.Command | None = None,
) -> dict[Key, Config]:
    """Returns the configurations of the command lines, each with seeds 0, 1, ….

    Raises:
      ValueError: fewer than one seed, a wrong command line, or a run that began with other
        settings or workers, which would make the comparison unfair.
    """
    lj.checks.check_positive_int("seeds", seeds)
    configs = {}
    for name, line in lines.items():
        for seed in range(seeds):
            folder = out / f"{name}-{seed}"
            arguments = [*line, "--seed", str(seed), "--run-dir", str(folder)]
            if (folder / run_folder.CONFIG).exists():
                arguments.append("--resume")
            configs[name, seed] = config = cli.parse(arguments, command)
            if config.resume:
                free = FREE_ON_RESUME - WORKERS - set(EQUAL) | {"steps"}
                run_folder.check_same_experiment(config, folder, free)
    return configs


def _examples(config: Config) -> int:
    """The number of examples that a run takes, with repetitions."""
    workers = config.workers.nodes * config.workers.locals
    return config.steps * config.batch_size * workers


def check_equal(configs: dict[Key, Config], out: pathlib.Path) -> None:
    """Raises ValueError if the runs are not tested after the same steps on the same data.

    They may take other numbers of steps if all see the same number of examples. A run of an
    earlier command may have taken more steps than this command asks for.
    """
    (first, _), *_ = configs
    expected = fields(configs[first, 0])
    for (name, _), config in configs.items():
        given = fields(config)
        same_examples = _examples(config) == _examples(configs[first, 0])
        for setting in EQUAL:
            if setting == "steps" and same_examples:
                continue  # fewer steps of larger batches
            if given[setting] != expected[setting]:
                raise ValueError(
                    f"`{setting}` must be equal for all methods of a comparison, got "
                    f"{expected[setting]!r} for {first} and {given[setting]!r} for {name}"
                )
    for (name, seed), config in configs.items():
        folder = out / f"{name}-{seed}"
        taken = max(records.last_steps(folder).values(), default=0)
        if taken > config.steps:
            raise ValueError(
                f"`steps` must be at least the {taken} that {folder} has taken, got "
                f"steps={config.steps}; compare fewer steps in another folder"
            )


def try_methods(configs: dict[Key, Config], out: pathlib.Path, session: Session) -> None:
    """Builds each method that has to train, and traces its step.

    Raises:
      ValueError: methods cannot train; it names them. Nothing has been written then.
    """
    datasets: dict[Any, Any] = {}
    wrong: dict[str, str] = {}
    for (name, seed), config in configs.items():
        if seed or _has_ended(out / f"{name}-{seed}", config.steps):
            continue
        try:
            if config.data not in datasets:
                datasets[config.data] = load_dataset(config)
            trace(config, datasets[config.data], session)
        except ValueError as error:
            if is_of_xla(error):
                raise
            wrong[name] = str(error)
    if wrong:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in wrong.items()))


def trace(config: Config, dataset: Any, session: Session) -> None:
    """Builds an experiment and traces its first step. Nothing is trained.

    Raises:
      ValueError: the method, the network, the workers and the data do not fit.
    """
    if config.method.is_asynchronous:
        check_installed("an asynchronous run", "async", "ray")
        AsynchronousExperiment(config, dataset, session=session).init()
        return
    experiment = Experiment(config, dataset, lambda text: None, session=session)
    state = experiment.init()
    batch = experiment.batch(0)
    # The whole step, with the exchange also if the first step has none.
    jax.eval_shape(experiment.step, state, experiment.data, batch)
    if experiment.skips:
        jax.eval_shape(experiment.skip, state)


def join(configs: dict[Key, Config]) -> Session:
    """Joins the other processes, with devices for the run with the most workers.

    Raises:
      ValueError: several processes compare asynchronous methods.
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
            "`methods` must run in lock step with several processes, got "
            f"{on_ray[0]}, whose workers are processes of Ray"
        )
    return session


class ComparisonResults(NamedTuple):
    """The tests of the runs that ended, and the reasons for which the others failed."""

    curves: dict[Key, Curve]
    failures: dict[Key, str]


def run(
    configs: dict[Key, Config], out: pathlib.Path, session: Session
) -> ComparisonResults | None:
    """Trains the runs that have not ended. The others go on if one fails.

    All methods train with the first seed, then with the next one: an interrupted comparison
    has pairs.

    Returns:
      The results of all runs, or None if a run was stopped.
    """
    failures: dict[Key, str] = {}
    pending: list[Key] = []
    times: dict[Key, float] = {}
    for name, seed in sorted(configs, key=lambda key: key[1]):
        folder = out / f"{name}-{seed}"
        config = configs[name, seed]
        if config.resume and _has_ended(folder, config.steps):
            ended_run = read(folder)
            times[name, seed] = ended_run.seconds[-1] + ended_run.compile_seconds
        else:
            pending.append((name, seed))
    for position, (name, seed) in enumerate(pending):
        config = configs[name, seed]
        if session.is_main:
            print(announcement(pending[position:], len(configs), times), flush=True)
        begun = time.monotonic()
        try:
            stopped_by = train(config, session)
        except Exception as error:
            if session.has_others:  # they may not have failed
                raise
            if not isinstance(error, EXPECTED):
                traceback.print_exc()
            failures[name, seed] = reason = one_line(error)
            print(f"error: {name}-{seed} failed: {reason}", file=sys.stderr)
            continue
        if stopped_by not in (None, NONFINITE):
            print(f"stopped; the same command resumes it in {out}", file=sys.stderr)
            return None
        if not config.resume:  # a part of a run says little about whole ones
            times[name, seed] = time.monotonic() - begun
    session.wait_for_all()  # the main process has now written all metrics
    ended = [key for key in configs if key not in failures]
    curves = {(name, seed): read(out / f"{name}-{seed}") for name, seed in ended}
    return ComparisonResults(curves, failures)


def announcement(pending: Sequence[Key], count: int, times: Mapping[Key, float]) -> str:
    """Returns the line before a run, with the time that is left if it can be told.

    Args:
      pending: the runs that have not ended; the first one begins.
      count: number of all runs.
      times: seconds of runs that have ended. A run takes as long as others of its method,
        or as all others if there are none.

    >>> announcement([("sgp", 0), ("lsgd", 1)], 6, {("lsgd", 0): 100.0})
    'run 5 of 6: sgp-0, about 3.3 min left'
    """
    (name, seed), *_ = pending
    line = f"run {count - len(pending) + 1} of {count}: {name}-{seed}"
    if not times:
        return line
    left = 0.0
    for name, _ in pending:
        of_method = [x for (other, _), x in times.items() if other == name]
        left += statistics.mean(of_method or times.values())
    return f"{line}, about {duration(left)} left"


# Errors of a run that its message explains.
EXPECTED = OSError, ValueError, WorkersLost, jax.errors.JaxRuntimeError


def train(config: Config, session: Session) -> signal.Signals | str | None:
    """Trains one run, and returns the reason for which it stopped early, or None."""
    opened = open_run(config, session)
    session.where = lambda: "in a comparison, which the same command resumes"
    try:
        return loop.train(opened).stopped_by
    finally:
        opened.checkpoints.close()
        if opened.lock is not None:
            opened.lock.release()


def _has_ended(folder: pathlib.Path, steps: int) -> bool:
    try:
        curve = read(folder)
    except (ValueError, FileNotFoundError):
        return False  # the run was killed before its first test, or its first line
    return curve.steps[-1] == steps or not math.isfinite(curve.values[-1])


def read(folder: pathlib.Path) -> Curve:
    """Reads the tests of a run folder.

    Raises:
      ValueError: the folder has no tests.
    """
    events = records.read(folder)
    tests = events.get("test", [])
    train = events.get("train", [])
    measure = of_events(tests)
    key = f"center_{measure.key}"
    tests = [test for test in tests if {key, "bytes_sent"} <= test.keys()]
    last = events.get("end", [{}])[-1]
    if last.get("stopped_by") == NONFINITE:
        sent = train[-1]["bytes_sent"] if train else 0
        tests.append({"bytes_sent": sent, **last, key: None})
    if not tests:
        raise ValueError(f"{folder / records.METRICS} holds no test")

    def is_finite(test):
        return None not in (test[key], test.get("center_loss", 0))

    sent = traffic.of_run(train)
    return Curve(
        steps=[test["step"] for test in tests],
        seconds=[test["seconds"] for test in tests],
        megabytes=[test["bytes_sent"] / 1e6 for test in tests],
        values=[test[key] if is_finite(test) else math.inf for test in tests],
        measure=measure,
        peak_megabytes=None if sent is None else float(sent.max() / 1e6),
        is_far_above_best=bool(last.get("far_above_best"))
        and last["step"] == tests[-1]["step"],
        bleu=last.get("center_bleu"),
        compile_seconds=last.get("compile_seconds", 0.0),
    )


def summarize(
    curves: dict[Key, Curve], failures: Mapping[Key, str] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Returns one row per method: final error, lowest error, seconds, bytes.

    Args:
      curves: the tests of the runs that ended.
      failures: the reasons for which the others failed.

    >>> curve = Curve([1, 2], [0.5, 1.0], [0.0, 8.0], [50.0, 10.0], compile_seconds=3)
    >>> (row,) = summarize({("lsgd", 0): curve})
    >>> row["method"], row["test error, %"], row["MB sent per worker"]
    ('lsgd', '10.00', '8.0')
    >>> row["training time, s"], row["compile time, s"]
    ('1.0', '3.0')
    >>> "BLEU" in row, summarize({("sgp", 0): curve._replace(bleu=21.5)})[0]["BLEU"]
    (False, '21.5')
    >>> (_, row) = summarize({("lsgd", 0): curve}, {("sgp", 0): "out of memory"})
    >>> row["method"], row["test error, %"], row["compile time, s"]
    ('sgp', 'failed: out of memory', '–')
    """
    rows = []
    measure = measure_of(curves)
    for method in dict.fromkeys(method for method, _ in [*curves, *failures]):
        runs = [curve for (name, _), curve in curves.items() if name == method]
        failed = [reason for (name, _), reason in failures.items() if name == method]
        seeds = len(runs) + len(failed)
        if not runs:
            failure = {measure.label: f"failed: {failed[0]}"}
            rows.append({"method": method, "seeds": seeds, **failure})
            continue
        peak = max(run.peak_megabytes or 0 for run in runs)
        columns = {
            measure.label: ([x.values[-1] for x in runs], measure.digits),
            f"lowest, {measure.unit}": ([min(x.values) for x in runs], measure.digits),
            "BLEU": ([x.bleu for x in runs if x.bleu is not None], 1),
            "training time, s": ([x.seconds[-1] for x in runs], 1),
            "compile time, s": ([x.compile_seconds for x in runs], 1),
            "MB sent per worker": ([x.megabytes[-1] for x in runs], 1),
        }
        row = {name: spread(*column) for name, column in columns.items() if column[0]}
        if not any(x.megabytes[-1] for x in runs):
            row["MB sent per worker"] += tables.NEVER
        if failed:
            row[measure.label] += f", {len(failed)} of {seeds} failed"
        peaks = {"peak MB in a step": f"{peak:.3g}" if peak else UNKNOWN}
        rows.append({"method": method, "seeds": seeds, **row, **peaks})
    fullest = max(rows, key=len)
    return [{column: row.get(column, UNKNOWN) for column in fullest} for row in rows]


def with_differences(
    rows: list[dict[str, Any]], curves: dict[Key, Curve]
) -> list[dict[str, Any]]:
    """Adds the difference to the first method: mean ± standard deviation over the seeds.

    Runs with the same seed start from the same parameters and see the same data. Their
    differences spread less than the runs themselves. Seeds with a run that failed or
    diverged are left out. With fewer than two seeds in common nothing is added.

    >>> curve = lambda error: Curve([1], [1.0], [8.0], [error])
    >>> curves = {("lsgd", 0): curve(5.0), ("lsgd", 1): curve(9.0)}
    >>> curves |= {("sgp", 0): curve(4.0), ("sgp", 1): curve(8.0)}
    >>> (_, row) = with_differences(summarize(curves), curves)
    >>> row["test error, %"], row["difference to lsgd, %"]
    ('6.00 ± 2.83', '-1.00 ± 0.00')
    """
    first = rows[0]["method"]
    measure = measure_of(curves)
    last = {key: curve.values[-1] for key, curve in curves.items()}
    last = {key: value for key, value in last.items() if math.isfinite(value)}
    cells = []
    for row in rows:
        of_method = {seed: x for (name, seed), x in last.items() if name == row["method"]}
        pairs = [
            x - last[first, seed] for seed, x in of_method.items() if (first, seed) in last
        ]
        cell = UNKNOWN
        if len(pairs) > 1 and row["method"] != first:
            cell = spread(pairs, measure.digits, sign="+")
            if len(pairs) < row["seeds"]:
                cell += f", {len(pairs)} of {row['seeds']} seeds"
        cells.append(cell)
    if set(cells) == {UNKNOWN}:
        return rows
    column = f"difference to {first}, {measure.unit}"
    return [{**row, column: cell} for row, cell in zip(rows, cells)]


def measure_of(curves: dict[Key, Curve]) -> Measure:
    """The measure of the runs. A run that diverged before its first test lacks it."""
    known = (x.measure for x in curves.values() if any(map(math.isfinite, x.values)))
    return next(known, ERROR)


def spread(numbers: Sequence[float], digits: int, sign: str = "") -> str:
    """Formats mean ± standard deviation, or the number of runs that diverged (inf).

    Args:
      numbers: one of each seed.
      digits: decimal places.
      sign: '+' to show that of positive means.

    >>> spread([1.0, 2.0, 3.0], 1), spread([1.0], 2), spread([1.0, math.inf], 1)
    ('2.0 ± 1.0', '1.00', '1 of 2 diverged')
    """
    wrong = sum(not math.isfinite(x) for x in numbers)
    if wrong:
        return f"{wrong} of {len(numbers)} diverged" if len(numbers) > 1 else "diverged"
    mean = f"{statistics.mean(numbers):{sign}.{digits}f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}"


def as_json(
    curves: dict[Key, Curve], failures: Mapping[Key, str] = MappingProxyType({})
) -> str:
    """The tests of each seed as JSON, with null for values that are not finite.

    A failed run has the reason as `failed`.
    """
    tests = []
    for (method, seed), curve in curves.items():
        known = [x if math.isfinite(x) else None for x in curve.values]
        tests.append({"method": method, "seed": seed, **curve._asdict(), "values": known})
    for (method, seed), reason in failures.items():
        tests.append({"method": method, "seed": seed, "failed": reason})
    return json.dumps(tests, indent=1) + "\n"


def write(rows: list[dict[str, Any]], out: pathlib.Path, name: str = "compare") -> str:
    """Writes rows to NAME.csv, NAME.tex and NAME.md; returns the text of NAME.md."""
    tables.write_csv(rows, out / f"{name}.csv")
    (out / f"{name}.tex").write_text(tables.latex(rows))
    text = tables.markdown(rows)
    (out / f"{name}.md").write_text(text)
    return text


AGAINST = {
    "steps": "step",
    "seconds": "training time, s",
    "megabytes": "MB sent per worker",
}
LINES = "-", "--", ":", "-."  # styles of seeds 0, 1, …


def draw(curves: dict[Key, Curve], path: pathlib.Path) -> None:
    """Draws the measure against steps, seconds and bytes, with one line per seed."""
    from train.metrics import drawing  # importing Matplotlib takes a second

    size = 3.5 * len(AGAINST) + 2.5, 4
    figure, panels = drawing.subplots(1, len(AGAINST), figsize=size, sharey=True)
    measure = measure_of(curves)
    methods = list(dict.fromkeys(name for name, _ in curves))
    colors = drawing.plt.get_cmap("tab10" if len(methods) <= 10 else "tab20")
    diverged = {method for (method, _), curve in curves.items() if curve.diverged}
    for axes, (name, xlabel) in zip(panels, AGAINST.items()):
        top = axes.get_xaxis_transform()  # a value that is not finite has no y
        for (method, seed), curve in curves.items():
            color = colors(methods.index(method))
            x = getattr(curve, name)
            mark = " (× diverged)" if method in diverged else ""
            label = None if seed else method + mark
            style = {"color": color, "ls": LINES[seed % len(LINES)], "lw": 1.2}
            axes.plot(x, curve.values, marker=".", label=label, **style)
            if curve.diverged:
                axes.plot(x[-1], 0.97, "x", color=color, transform=top)
        axes.set(xlabel=xlabel, yscale="log")
        drawing.plain_numbers(axes.yaxis)
        sent = sorted(x for curve in curves.values() for x in curve.megabytes if x)
        if name == "megabytes" and sent and sent[-1] > 50 * sent[0]:
            axes.set_xscale("symlog", linthresh=sent[0])  # some methods send nothing
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(left=0)
    panels[0].set_ylabel(f"{measure.name} of the center, {measure.unit}")
    labeled = panels[0].get_legend_handles_labels()
    title = "a line style per seed" if any(seed for _, seed in curves) else None
    figure.legend(*labeled, loc="outside right upper", frameon=False, title=title)
    drawing.save(figure, path)


def main(arguments: Sequence[str]) -> int:
    """Compares methods.

    Returns:
      The exit status: 0, 1 (a run was stopped or diverged) or 2 (wrong usage). With several
      processes also 70: an unexpected error, and 75: a process was lost.
    """
    session = Session()
    try:
        configs, out = parse(arguments)
        session = join(configs)
    except ValueError as error:
        return session.leave(WRONG_USAGE, str(error))
    except OSError as error:
        return session.leave(STOPPED, str(error))
    with session.ended_by_errors():
        return compare(configs, out, session)


def compare(configs: dict[Key, Config], out: pathlib.Path, session: Session) -> int:
    """Compares together with the processes of the session; returns the exit status."""
    try:
        compilation_cache.use(say=session.is_main)
        try_methods(configs, out, session)
        results = run(configs, out, session)
        if results is None:
            return STOPPED
        curves, failures = results
        if session.is_main:
            out.mkdir(parents=True, exist_ok=True)
            rows = with_differences(summarize(curves, failures), curves)
            print(write(rows, out), end="")
            (out / "compare.json").write_text(as_json(curves, failures))
            if curves:
                draw(curves, out / "compare.png")
    except ValueError as error:
        if is_of_xla(error):
            raise
        return session.leave(WRONG_USAGE, str(error))
    except (OSError, WorkersLost) as error:
        return session.leave(STOPPED, f"{error}; the same command resumes it")
    diverged = [f"{name}-{seed}" for (name, seed), x in curves.items() if x.diverged]
    failed = [f"{name}-{seed}" for name, seed in failures]
    for kind, names in {"diverged": diverged, "failed": failed}.items():
        if names and session.is_main:
            print(f"error: {kind}: {', '.join(names)}", file=sys.stderr)
    return STOPPED if diverged or failed else SUCCESS


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
