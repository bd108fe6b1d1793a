"""A race of methods with equal periods, each at its best learning rate.

    python benchmarks/races.py EXPERIMENT --out DIR [--seeds 3] [--rates 0.05 0.1 0.3] \\
        [--periods 16 64] [--only lsgd-16 sgp ...] [options of python -m train.compare]

trains every method with seed 0 at each learning rate, chooses the rate with the lowest
final test error of the center, and trains with it for the other seeds. DIR gets the files
of `python -m train.compare` for the chosen rates, and races.md: the test error of the
center (mean ± standard deviation) after all steps, and at the last test within the bytes
and within the seconds of the method that used the fewest. The same command resumes an
interrupted race.
"""

import argparse
import json
import pathlib
import sys

from train import compare
from train.metrics import tables


# Pulls as in the paper: one leader or one center, and a strength of 0.1.
WITH_PERIOD = {
    "lsgd": "--method lsgd --method.local-pull 0.1 --method.global-pull 0 "
    "--method.local-period {0}",
    "easgd": "--method easgd --method.period {0}",
    "local-sgd": "--method local-sgd --method.period {0}",
    "diloco": "--method diloco --method.period {0}",
    "streaming-int8": "--method diloco --method.period {0} --method.fragments 4 "
    "--method.delay 2 --method.wire int8",
}
AT_EVERY_STEP = {"sgp": "--method sgp", "allreduce": "--method allreduce"}


def entrants(periods):
    """Returns the options of each method by its name."""
    often = {
        f"{name}-{period}": options.format(period)
        for period in periods
        for name, options in WITH_PERIOD.items()
    }
    return often | AT_EVERY_STEP


def trained(names, options, rest, seeds):
    """Runs `train.compare` on pairs (method, rate) and returns the tests of each pair."""
    arguments = [options.experiment, "--out", options.out, "--seeds", str(seeds), *rest]
    methods = entrants(options.periods)
    for name, rate in names:
        own = f"{methods[name]} --optimizer.learning-rate {rate}"
        arguments += ["--variant", f"{name}-rate-{rate}={own}"]
    tests = pathlib.Path(options.out) / "compare.json"
    tests.unlink(missing_ok=True)
    status = compare.main(arguments)
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


def table(races):
    """Returns a row for each method."""
    ends = {measure: [] for measure in ("megabytes", "seconds")}
    for runs in races.values():
        for measure, seen in ends.items():
            seen.append(max(run[measure][-1] for run in runs))
    limits = {measure: min(seen) for measure, seen in ends.items()}
    rows = []
    for (name, rate), runs in races.items():
        _, label, _, digits = runs[0]["measure"]
        spread = lambda values, digits=digits: (
            "–" if None in values else compare.spread(values, digits)
        )
        each = lambda measure, runs=runs: [
            within(r, measure, limits[measure]) for r in runs
        ]
        rows.append(
            {
                "method": name,
                "learning rate": rate,
                f"{label} after all steps": spread([r["values"][-1] for r in runs]),
                f"within {limits['megabytes']:.0f} MB": spread(each("megabytes")),
                f"within {limits['seconds']:.0f} s": spread(each("seconds")),
                "MB sent per worker": f"{runs[0]['megabytes'][-1]:.0f}",
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.3])
    parser.add_argument("--periods", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="train only these")
    options, rest = parser.parse_known_args()
    methods = entrants(options.periods)
    if unknown := set(options.only or ()) - set(methods):
        parser.error(
            f"--only must name some of {', '.join(methods)}, got {', '.join(unknown)}"
        )
    all_rates = [(n, r) for n in options.only or methods for r in options.rates]
    tried = trained(all_rates, options, rest, seeds=1)
    last = lambda key: tried[key][0]["values"][-1] or float("inf")  # None: diverged
    names = dict.fromkeys(name for name, _ in tried)
    best = [min((k for k in tried if k[0] == name), key=last) for name in names]
    text = tables.markdown(table(trained(best, options, rest, options.seeds)))
    (pathlib.Path(options.out) / "races.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
