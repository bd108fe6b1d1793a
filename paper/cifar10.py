"""CIFAR-10: LSGD and its relatives with three networks, beside the published figures.

    python -m paper cifar10 --data.dir DIR --out OUT --model resnet20 --workers 16

trains LSGD, EASGD, DOWNPOUR, all-reduce SGD, LARS and a single worker (`sgd`) with the
paper's settings. Options of `python -m train` may follow and apply to all of them. OUT gets
a run folder for each, `cifar10.png` (test error over steps, seconds and bytes) and two
tables with the published figures beside ours: `cifar10` (errors, bytes, leader changes) and
`reached` (seconds of training to an error). The same command resumes an interrupted
comparison.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import lsgd_jax as lj
from train import compare
from train.cluster.session import Session
from train.compare import Curve, spread
from train.config import Config
from train.metrics import log as records
from train.process.exit_status import STOPPED, SUCCESS, WRONG_USAGE
from train.run import cli


GRIDS = {4: (1, 4), 12: (3, 4), 16: (4, 4)}
PERIOD = 64

# EASGD and DOWNPOUR have the period of LSGD, so that a worker sends as many bytes.
METHODS = {
    "lsgd": "--method lsgd".split(),
    "easgd": f"--method easgd --method.period {PERIOD}".split(),
    "downpour": f"--method downpour --method.period {PERIOD}".split(),
    "allreduce": "--method allreduce".split(),
    "lars": "--method allreduce --optimizer.name lars".split(),
    "sgd": "--method independent --workers.nodes 1 --workers.locals 1".split(),
}

# The learning rate with Nesterov's momentum was not published: 0.01 keeps η / (1 - μ).
RECIPES = {
    "paper": [],
    "nesterov": (
        "--optimizer.momentum 0.9 --optimizer.nesterov --optimizer.learning-rate 0.01"
    ).split(),
}
LARS_RATE = 100  # times the others' learning rate: LARS scales it by 0.001 |w| / |g|

# Test error in % at the end (and the lowest). Teng et al., NeurIPS 2019, poster. Figures
# with Nesterov's momentum are from the first author's later pages; SGD is data-parallel.
PUBLISHED = """
| model | workers | recipe | lsgd | easgd | downpour | sgd | lars | allreduce |
| cnn7 | 16 | paper | 17.0 (16.9) | 17.3 (17.3) | 20.1 (18.6) | 19.9 (19.2) | – | – |
| cnn7 | 4 | paper | 17.6 (17.3) | 17.5 (17.2) | 18.7 (18.3) | 19.9 (19.2) | – | – |
| resnet20 | 16 | paper | 9.1 (8.7) | 10.0 (9.5) | 11.5 (11.4) | 9.65 (9.6) | – | – |
| resnet20 | 4 | paper | 9.1 (9.0) | 9.4 (9.3) | 9.4 (9.1) | 9.6 (9.5) | – | – |
| vgg16 | 4 | paper | 9.9 (9.8) | 10.3 (10.0) | 10.1 (10.0) | 9.6 (9.6) | – | – |
| resnet20 | 12 | nesterov | 8.5 | 9.7 | – | – | 8.2 | 10.2 |
| cnn7 | 12 | nesterov | 16.8 | 16.7 | – | – | 17.0 | 17.8 |
"""
# Seconds to an error in % with 16 workers, from the poster.
PUBLISHED_SECONDS = {
    ("cnn7", "lsgd"): {25: 97, 20: 219, 19: 272, 18: 371},
    ("cnn7", "easgd"): {25: 150, 20: 306, 19: 384, 18: 605},
    ("resnet20", "lsgd"): {20: 84, 15: 152, 12: 287, 10: 578},
    ("resnet20", "easgd"): {20: 333, 15: 401, 12: 561, 10: 1030},
}
GOALS = {"cnn7": (40, 30, 25, 20, 19, 18), "resnet20": (40, 20, 15, 12, 10)}
GOALS["vgg16"] = GOALS["resnet20"]

PaperSetting = tuple[str, int, str]


@dataclasses.dataclass(frozen=True)
class PaperComparisonOptions:
    """The options of the comparison."""

    # Folder for runs and results.
    out: pathlib.Path
    # The network.
    model: Literal["cnn7", "resnet20", "vgg16"] = "cnn7"
    # Number of workers: 4, 3 x 4 or 4 x 4.
    workers: Literal[4, 12, 16] = 4
    # The paper's settings, or the later ones with Nesterov's momentum 0.9.
    recipe: Literal["paper", "nesterov"] = "paper"
    # Methods, joined by commas.
    methods: str = ",".join(METHODS)
    # Number of seeds per method.
    seeds: int = 1


def parse(
    arguments: Sequence[str],
) -> tuple[dict[compare.Key, Config], PaperSetting, pathlib.Path]:
    """Returns the configuration of every (method, seed), the setting and the folder.

    Raises:
      ValueError: an unknown model, number of workers, recipe or method.
    """
    program = "python -m paper cifar10"
    options, others = cli.run_with_others(
        PaperComparisonOptions, arguments, program, __doc__
    )
    compare.check_left_out(others, "--method", "--workers.nodes", "--workers.locals")
    nodes, locals = GRIDS[options.workers]
    grid = ["--workers.nodes", str(nodes), "--workers.locals", str(locals)]
    start = [f"cifar10-{options.model}", *grid, *RECIPES[options.recipe], *others]
    commands = {}
    for method in options.methods.split(","):
        lj.checks.check_option("methods", method, tuple(METHODS))
        commands[method] = [*start, *METHODS[method]]
        if method == "lsgd" and nodes > 1:
            commands[method] += ["--method.global-pull", "0.1"]
        if method == "lars":
            rate = LARS_RATE * cli.parse(start).optimizer.learning_rate
            commands[method] += ["--optimizer.learning-rate", str(rate)]
    setting = (options.model, options.workers, options.recipe)
    return compare.of_seeds(commands, options.seeds, options.out), setting, options.out


def published(setting: PaperSetting) -> dict[str, str]:
    """Returns the published errors of a setting by method.

    >>> published(("vgg16", 4, "paper"))["easgd"]
    '10.3 (10.0)'
    """

    def cells(line):
        return [cell.strip() for cell in line.strip("|").split("|")]

    head, *rows = map(cells, PUBLISHED.strip().splitlines())
    found = (row for row in rows if row[:3] == list(map(str, setting)))
    return dict(zip(head[3:], next(found, [])[3:]))


def leader_changes(folder: pathlib.Path) -> str:
    """Returns how often the leader of the first node changed, as "N of ELECTIONS"."""
    elections = records.read(folder).get("leaders", [])
    leaders = [event["leaders"][0] for event in elections if event["level"] == "node"]
    if not leaders:
        return "–"
    changes = sum(a != b for a, b in zip(leaders, leaders[1:]))
    return f"{changes} of {len(leaders)}"


def errors(
    curves: dict[compare.Key, Curve], setting: PaperSetting, out: pathlib.Path
) -> list[dict[str, Any]]:
    """Returns a row per method: its errors and the published ones."""
    known = published(setting)
    rows = []
    for row in compare.summarize(curves):
        method = row["method"]
        row["published: end (best)"] = known.get(method, "–")
        row["changes of the leader"] = leader_changes(out / f"{method}-0")
        rows.append(row)
    return rows


def reached(
    curves: dict[compare.Key, Curve], setting: PaperSetting
) -> list[dict[str, Any]]:
    """Returns a row per method: seconds of training until the error reached each goal.

    >>> curves = {("lsgd", 0): Curve([1, 2], [5.0, 9.0], [0.0, 0.0], [42.0, 24.0])}
    >>> (row,) = reached(curves, ("cnn7", 4, "paper"))
    >>> row["40 %"], row["25 %"], row["18 %"]
    ('9 s', '9 s', '–')
    """
    model, workers, recipe = setting
    rows = []
    is_known = (workers, recipe) == (16, "paper")
    for method in dict.fromkeys(method for method, _ in curves):
        row = {"method": method}
        known = PUBLISHED_SECONDS.get((model, method), {}) if is_known else {}
        for goal in GOALS[model]:
            runs = [curve for (name, _), curve in curves.items() if name == method]
            times = [_seconds_to(goal, curve) for curve in runs]
            found = [seconds for seconds in times if seconds is not None]
            text = f"{spread(found, 0)} s" if found else "–"
            if 0 < len(found) < len(runs):
                text += f" ({len(found)} of {len(runs)} seeds)"
            if goal in known:
                text += f" (published {known[goal]} s)"
            row[f"{goal} %"] = text
        rows.append(row)
    return rows


def _seconds_to(goal: float, curve: Curve) -> float | None:
    pairs = zip(curve.seconds, curve.values)
    return next((seconds for seconds, error in pairs if error <= goal), None)


def main(arguments: Sequence[str]) -> int:
    """Compares and returns the status: 0, 1 (a run did not end) or 2 (wrong usage)."""
    session = Session()
    try:
        configs, setting, out = parse(arguments)
        session = compare.join(configs)
        compare.try_methods(configs, out, session)
        results = compare.run(configs, out, session)
    except ValueError as error:
        return session.leave(WRONG_USAGE, str(error))
    if results is None or results.failures:
        return STOPPED
    curves = results.curves
    if not session.is_main:
        return SUCCESS
    print(compare.write(errors(curves, setting, out), out, "cifar10"))
    print(compare.write(reached(curves, setting), out, "reached"), end="")
    compare.draw(curves, out / "cifar10.png")
    return SUCCESS
