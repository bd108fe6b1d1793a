"""A race of methods with equal periods, each at its best learning rate.

    python benchmarks/races.py EXPERIMENT --out DIR [--seeds 3] [--rates 0.05 0.1 0.3] \\
        [--periods 16 64] [--only lsgd-16 sgp ...] [options of python -m train.compare]
    python benchmarks/races.py text --entrants one-machine --out DIR --rates 0.004 0.008
    python benchmarks/races.py text --entrants replicas --out DIR --rates 0.004 0.008 0.016

trains every method with seed 0 at each learning rate, chooses the rate with the lowest
final test result of the center, and trains with it for the other seeds. DIR gets the files
of `python -m train.compare` for the chosen rates, and races.md: the results at each rate,
and at the best one (mean ± standard deviation) after all steps and at the last test within
the bytes and within the seconds of the method that used the fewest. The same command
resumes an interrupted race.

The entrants `one-machine` are outer optimizers around one worker, and several workers with
a quarter of the steps, which all see the same number of tokens. The entrants `replicas` are
data parallel and DiLoCo of 1, 2 and 4 workers that share its batch, at several outer rates.
"""

import json
import pathlib
import sys

from usage import parser

from train import compare
from train.metrics import tables


# Pulls as in the paper: one leader or one center, and a strength of 0.1.
WITH_PERIOD = {
    "lsgd": "--method lsgd --method.local-pull 0.1 --method.global-pull 0 "
    "--method.local-period {0}",
    "easgd": "--method easgd --method.period {0}",
    "local-sgd": "--method local-sgd --method.period {0}",
    "diloco": "--method diloco --method.period {0}",
    "palsgd": "--method palsgd --method.period {0}",
    "streaming-int8": "--method diloco --method.period {0} --method.fragments 4 "
    "--method.delay 2 --method.wire int8",
}
AT_EVERY_STEP = {"sgp": "--method sgp", "allreduce": "--method allreduce"}
ONE = "--workers.locals 1 --steps 2000"
QUARTER = "--steps 500 --optimizer.warmup-steps 25"
ONE_MACHINE = {
    "adamw": f"{ONE} --method independent",
    "adamw-batch-48": f"--workers.locals 1 {QUARTER} --batch-size 48 --method independent",
    **{
        f"outer-momentum-{mu}": f"{ONE} --method diloco --method.period 20 "
        f"--method.outer-momentum {mu}"
        for mu in (0.9, 0.5, 0.0)
    },
    "workers-lsgd": f"{QUARTER} --method.local-period 20",  # and a pull of 0.5
    "workers-local-sgd": f"{QUARTER} --method local-sgd --method.period 20",
    "workers-diloco": f"{QUARTER} --method diloco --method.period 20",
}
REPLICAS = {
    "data-parallel": "--method independent --workers.locals 1 --batch-size 48",
    **{
        f"diloco-{m}-outer-{rate}": "--method diloco --method.period 30 "
        f"--method.outer-learning-rate {rate} --workers.locals {m} --batch-size {48 // m}"
        for m in (1, 2, 4)
        for rate in (0.2, 0.4, 0.6, 0.8, 1.0)
    },
}
GROUPS = {"one-machine": ONE_MACHINE, "replicas": REPLICAS}


def entrants(options):
    """Returns the options of each method by its name."""
    if options.entrants in GROUPS:
        return GROUPS[options.entrants]
    often = {
        f"{name}-{period}": words.format(period)
        for period in options.periods
        for name, words in WITH_PERIOD.items()
    }
    return often | AT_EVERY_STEP


def command(names, options, rest, seeds):
    """Returns the arguments of `train.compare` for pairs (method, rate)."""
    arguments = [options.experiment, "--out", options.out, "--seeds", str(seeds), *rest]
    for name, rate in names:
        own = f"{entrants(options)[name]} --optimizer.learning-rate {rate}"
        arguments += ["--variant", f"{name}-rate-{rate}={own}"]
    return arguments


def trained(names, options, rest, seeds):
    """Runs `train.compare` on pairs (method, rate) and returns the tests of each pair."""
    tests = pathlib.Path(options.out) / "compare.json"
    tests.unlink(missing_ok=True)
    status = compare.main(command(names, options, rest, seeds))
    if not tests.exists():  # it also exists with status 1 if a run has diverged
        sys.exit(status)
    found = {}
    for run in json.loads(tests.read_text()):
        found.setdefault(run["method"], []).append(run)
    return {(name, rate): found[f"{name}-rate-{rate}"] for name, rate in names}


def within(run, measure, limit):
    """Returns the center's value at the last test within 'megabytes' or 'seconds'."""
    inside = [v for v, spent in zip(run["values"], run[measure]) if spent <= limit]
    return inside[-1] if inside else None


def table(races, tried):
    """Returns a row for each method."""
    ends = {measure: [] for measure in ("megabytes", "seconds")}
    for runs in races.values():
        for measure, seen in ends.items():
            seen.append(max(run[measure][-1] for run in runs))
    limits = {measure: min(seen) for measure, seen in ends.items()}
    _, label, _, digits = next(iter(races.values()))[0]["measure"]
    spread = lambda values: "–" if None in values else compare.spread(values, digits)
    final = lambda runs: spread([run["values"][-1] for run in runs])
    rows = []
    for (name, rate), runs in races.items():
        at = {r: final(seen) for (other, r), seen in tried.items() if other == name}
        each = {m: [within(r, m, limit) for r in runs] for m, limit in limits.items()}
        rows.append(
            {
                "method": name,
                "by learning rate": ", ".join(f"{r:g}: {text}" for r, text in at.items()),
                "learning rate": rate,
                f"{label} after all steps": final(runs),
                f"within {limits['megabytes']:.0f} MB": spread(each["megabytes"]),
                f"within {limits['seconds']:.0f} s": spread(each["seconds"]),
                "MB sent per worker": f"{runs[0]['megabytes'][-1]:.0f}",
            }
        )
    return rows


def parse(arguments):
    """Returns the options, and those for `train.compare`."""
    words = parser(__doc__)
    words.add_argument("experiment")
    words.add_argument("--entrants", choices=["periods", *GROUPS], default="periods")
    words.add_argument("--out", required=True)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.3])
    words.add_argument("--periods", type=int, nargs="+", default=[16, 64])
    words.add_argument("--only", nargs="+", metavar="METHOD", help="train only these")
    options, rest = words.parse_known_args(arguments)
    if unknown := set(options.only or ()) - set(methods := entrants(options)):
        words.error(
            f"--only must name some of {', '.join(methods)}, got {', '.join(unknown)}"
        )
    return options, rest


def main():
    options, rest = parse(sys.argv[1:])
    names = options.only or list(entrants(options))
    all_rates = [(name, rate) for name in names for rate in options.rates]
    tried = trained(all_rates, options, rest, seeds=1)
    last = lambda key: tried[key][0]["values"][-1] or float("inf")  # None: diverged
    best = [min((k for k in tried if k[0] == name), key=last) for name in names]
    rows = table(trained(best, options, rest, options.seeds), tried)
    text = tables.markdown(rows)
    (pathlib.Path(options.out) / "races.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
