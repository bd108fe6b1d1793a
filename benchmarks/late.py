"""The cost of a late exchange: by method, by the form of the landing, and by the delay.

    python benchmarks/late.py --out DIR --data.files FILE [--seeds 3] [--period 20] \\
        [--only local-sgd lsgd ...] [options of python -m train.compare]

trains a small transformer with 4 workers, without a delay and with a delay of d steps. A
late target replaces a worker's parameters, or is added to the steps since its agreement;
then d may be the whole period. Half of either is DiLoCo with a mixing of 0.5. Local SGD is
DiLoCo with an outer rate of 1 and no momentum. All runs of a seed see the same data.

DIR gets the files of `python -m train.compare`, and late.md: the validation loss of the
center after the last step, at which a target lands, as mean ± standard deviation over the
seeds. In brackets is the difference to the method itself, without a delay and a mixing.
Settings that differ clearly, or hardly at all, run with seed 0 alone, and their cells have
no deviation. The same command resumes an interrupted study.
"""

import json
import pathlib
import statistics
import sys

from usage import parser

from train import compare
from train.metrics import tables


SMALL = (
    "--steps 400 --transformer.layers 2 --transformer.width 64 "
    "--optimizer.learning-rate 0.008"
).split()
OUTER = "--method diloco --method.outer-learning-rate {} --method.outer-momentum {}"
LEADER = (
    "--method lsgd --method.local-pull {} --method.global-pull 0 "
    "--method.local-period {{period}}"
)
METHODS = {
    "local-sgd": "--method local-sgd",
    "diloco-0.7-0.9": OUTER.format(0.7, 0.9),
    "lsgd-0.5": LEADER.format(0.5),
    "diloco-0.7-0.6": OUTER.format(0.7, 0.6),
}
IN_DETAIL = ("local-sgd", "diloco-0.7-0.9")
FORMS = {
    "replace": "",
    "half": "--method.mixing 0.5",
    "add": "--method.late add",
    "half-add": "--method.mixing 0.5 --method.late add",
}
NO_DELAY = "without"


def delays(method, form, period):
    """Returns the delays of a form with all seeds, and those with seed 0 alone."""
    half = period // 2
    early = [period // 4, 1] if method in IN_DETAIL else []
    if form == "add":
        return [half, period], early
    if form == "replace":
        return [half], [period - 1, *early]
    if method.startswith("lsgd"):
        return [], []  # which pulls by a half already
    if form == "half":
        return [half, period - 1], [0]
    return [period], [half]


def command(name, form, delay, period):
    """Returns the options of a run."""
    words = METHODS[name].replace("{period}", str(period))
    if "half" in form and name == "local-sgd":
        words = OUTER.format(1.0, 0.0)
    if "period" not in words:
        words += f" --method.period {period}"
    if form == NO_DELAY:
        return words
    return f"{words} --method.delay {delay} {FORMS[form]}"


def settings(options):
    """Returns (method, form, delay) of the runs of all seeds, and of those of seed 0."""
    every = []
    first = []
    for name in options.only or METHODS:
        every.append((name, NO_DELAY, 0))
        for form in FORMS:
            many, one = delays(name, form, options.period)
            every += [(name, form, delay) for delay in many]
            first += [(name, form, delay) for delay in one]
    return every, first


def named(key):
    """Returns the name of a run of a seed."""
    method, form, delay = key
    return f"{method}-{form}-{delay}"


def trained(keys, options, rest, seeds):
    """Runs `train.compare`, and returns the last losses by (method, form, delay)."""
    arguments = ["text", "--out", options.out, "--seeds", str(seeds), *SMALL, *rest]
    for key in keys:
        arguments += ["--variant", f"{named(key)}={command(*key, options.period)}"]
    tests = pathlib.Path(options.out) / "compare.json"
    tests.unlink(missing_ok=True)
    status = compare.main(arguments)
    if not tests.exists():  # it also exists with status 1 if a run has diverged
        sys.exit(status)
    found = {}
    for run in json.loads(tests.read_text()):
        found.setdefault(run["method"], []).append(run["values"][-1])
    return {key: found.get(named(key), []) for key in keys}


def cell(losses, without):
    """Returns the losses of a setting, and how much more they are than without a delay.

    >>> cell([2.5, 2.7], [2.0, 2.2, 2.3])
    '2.600 ± 0.141 (+0.500)'
    """
    if None in losses or not losses:
        return "–"
    text = compare.spread(losses, 3)
    more = statistics.mean(a - b for a, b in zip(losses, without))
    return f"{text} ({more:+.3f})" if losses is not without else text


def table(losses):
    """Returns a row for each method and form."""
    columns = sorted({delay for *_, delay in losses})
    rows = {}
    for (method, form, delay), found in losses.items():
        without = losses[method, NO_DELAY, 0]
        if form == NO_DELAY:
            continue
        row = rows.setdefault((method, form), {})
        if "half" not in form:
            row[0] = cell(without, without)
        row[delay] = cell(found, without)
    return [
        {"method": method, "late": form, **{f"d = {d}": row.get(d, "–") for d in columns}}
        for (method, form), row in rows.items()
    ]


def parse(arguments):
    """Returns the options, and those for `train.compare`."""
    words = parser(__doc__)
    words.add_argument("--out", required=True)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--period", type=int, default=20)
    words.add_argument("--only", nargs="+", metavar="METHOD", choices=METHODS)
    return words.parse_known_args(arguments)


def main():
    options, rest = parse(sys.argv[1:])
    every, first = settings(options)
    losses = trained(every, options, rest, options.seeds)
    losses |= trained(first, options, rest, seeds=1)
    text = tables.markdown(table(losses))
    (pathlib.Path(options.out) / "late.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
