"""The cost of a late exchange: by method, by the form of the landing, and by the delay.

    python benchmarks/late.py --out DIR --data.files FILE [--seeds 3] \\
        [--only local-sgd lsgd-0.5 ...] [options of python -m train.compare]

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
LEADER = "--method lsgd --method.local-pull 0.5 --method.global-pull 0"
METHODS = {
    "local-sgd": "--method local-sgd",
    "diloco-0.7-0.9": OUTER.format(0.7, 0.9),
    "lsgd-0.5": LEADER,
    "diloco-0.7-0.6": OUTER.format(0.7, 0.6),
}
PERIOD = 20
WITHOUT = "without"  # a delay
FORMS = {
    WITHOUT: "",
    "replace": "",
    "half": "--method.mixing 0.5",
    "add": "--method.late add",
    "half-add": "--method.mixing 0.5 --method.late add",
}
# The delays by form: those of all seeds, those of seed 0, and those of seed 0 for the first
# two methods.
ALL_SEEDS = {
    WITHOUT: [0],
    "replace": [10],
    "half": [10, 19],
    "add": [10, 20],
    "half-add": [20],
}
SEED_0 = {"replace": [19], "half": [0], "half-add": [10]}
IN_DETAIL = {"replace": [1, 5], "add": [1, 5]}
DETAILED = ("local-sgd", "diloco-0.7-0.9")


def settings(options):
    """Returns (method, form, delay) of the runs of all seeds, and of those of seed 0."""
    every = []
    first = []
    for name in options.only or METHODS:
        every += combined(name, ALL_SEEDS)
        first += combined(name, SEED_0)
        if name in DETAILED:
            first += combined(name, IN_DETAIL)
    return every, first


def combined(name, delays):
    """Returns (method, form, delay) of a method. LSGD pulls by a half already."""
    is_half = name.startswith("lsgd")
    forms = [form for form in delays if not (is_half and "half" in form)]
    return [(name, form, delay) for form in forms for delay in delays[form]]


def command(name, form, delay):
    """Returns the options of a run."""
    words = METHODS[name]
    if "half" in form and name == "local-sgd":
        words = OUTER.format(1.0, 0.0)
    period = "local-period" if name.startswith("lsgd") else "period"
    return f"{words} --method.{period} {PERIOD} --method.delay {delay} {FORMS[form]}"


def named(key):
    """Returns the name of a run of a seed."""
    method, form, delay = key
    return f"{method}-{form}-{delay}"


def trained(keys, options, rest, seeds):
    """Runs `train.compare`, and returns the last losses by (method, form, delay)."""
    arguments = ["text", "--out", options.out, "--seeds", str(seeds), *SMALL, *rest]
    for key in keys:
        arguments += ["--variant", f"{named(key)}={command(*key)}"]
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
        without = losses[method, WITHOUT, 0]
        if form == WITHOUT:
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
