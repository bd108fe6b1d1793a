"""Predicted and measured utilization of 48 DiLoCo runs that others made and published.

    git clone https://github.com/Adnan082/diloco-measured
    python benchmarks/diloco_measured.py diloco-measured --figure FILE

reads the runs of Adnan082/diloco-measured (Apache-2.0) from its clone: 30.8 M parameters on
4 hosts with one L40S each, torch and NCCL over TCP, links shaped by tc. A run's utilization
is its seconds of computing over all its seconds, after a warm-up.

Each prediction takes two numbers of a run, the seconds of a step and the bandwidth that
iperf found on the shaped link. Only the last one takes a third.

- literature: the formula that is published beside the runs, in which an exchange takes the
  bytes of the parameters over the bandwidth;
- plan: `python -m train.plan` for these two numbers;
- simulator: the steps that were counted of a simulated run of as many steps. The vector is
  a thousandth of the parameters, on a thousandth of the bandwidth;
- calibrated: the simulator on the bandwidth at which an exchange takes as long as in the
  runs with H = 1 at the same rate.
"""

import collections
import json
import math
import pathlib
import statistics
from typing import NamedTuple

import jax.numpy as jnp
from usage import head, parser, row

import lsgd_jax as lj
from train.metrics.drawing import plt
from train.planning.candidates import MethodVariant
from train.planning.engine import still
from train.planning.links import Link
from train.planning.scenario import ALL, Scenario


WORKERS = 4
PARAMETERS = 30_846_720
LATENCY = 100e-6  # seconds; not published, and nothing beside the exchanges
SMALLER = 1000  # the vector and the bandwidth of the simulator
KINDS = "literature", "plan", "simulator", "calibrated"
RUNS = "results/raw/cu_grid-diloco-30m-h*-bw*-r*.json"


class Run(NamedTuple):
    """A published run.

    Attributes:
      period: H.
      level: the bandwidth that was asked for, in bits per second.
      bandwidth: what iperf found, in bits per second.
      warmup, steps: the steps that are not counted, and all.
      step: seconds of computing per step.
      exchange: seconds of an exchange that is counted.
      measured, literature: the utilization, and what the literature's formula predicts.
    """

    period: int
    level: int
    bandwidth: float
    warmup: int
    steps: int
    step: float
    exchange: float
    measured: float
    literature: float


def run_of(record):
    """Returns a run from its file."""
    spec = record["spec"]
    cu = record["cu"]
    period = spec["H"]
    warmup = spec["warmup_steps"]
    steps = spec["budget_value"]
    return Run(
        period,
        spec["bandwidth_requested_bps"],
        record["shaping"]["measured_bps"],
        warmup,
        steps,
        cu["compute_s"] / (steps - warmup),
        cu["sync_blocked_s"] / (steps // period - warmup // period),
        cu["cu_measured"],
        cu["cu_analytic_link"],
    )


def read(clone):
    """Returns the shaped runs."""
    records = [json.loads(path.read_text()) for path in sorted(clone.glob(RUNS))]
    shaped = [r for r in records if r["spec"]["bandwidth_requested_bps"] is not None]
    return [run_of(record) for record in shaped if record["status"] == "completed"]


# Predictions


def planned(run):
    """Seconds of an exchange and the utilization, by the planner."""
    link = Link.of(1e-6 * run.bandwidth, 1e3 * LATENCY, WORKERS)
    scenario = Scenario(PARAMETERS, {ALL: link}, step=run.step)
    found = scenario.candidate(MethodVariant("diloco"), (run.period,))
    return link.seconds("mean", PARAMETERS), 1 - found.share


STILL = still(jnp.zeros(PARAMETERS // SMALLER))


def simulated(run, slower=1.0):
    """The utilization of the steps that were counted, if exchanges take so much longer."""
    ends = []
    network = lj.asynchronous.Network(run.bandwidth / 8 / SMALLER / slower, LATENCY)
    lj.asynchronous.simulator.run(
        STILL,
        lj.asynchronous.Pulls(lj.diloco(run.period)),
        WORKERS,
        1,
        run.steps,
        network,
        lj.asynchronous.Speeds(run.step),
        timeout=math.inf,
        collectives=True,
        observe=lambda worker: worker.index or ends.append(worker.transport.now()),
    )
    return (run.steps - run.warmup) * run.step / (ends[-1] - ends[run.warmup - 1])


def predictions(runs):
    """Returns the predictions of each run, by kind."""
    exchanges = collections.defaultdict(list)
    for run in runs:
        if run.period == 1:
            exchanges[run.level].append(run.exchange)
    found = []
    for run in runs:
        seconds, share = planned(run)
        slower = statistics.median(exchanges[run.level]) / seconds
        every = run.literature, share, simulated(run), simulated(run, slower)
        found.append(dict(zip(KINDS, every)))
    return found


# Table and figure


def by_point(runs, values):
    """Returns the median over the repeats of each (H, bandwidth)."""
    points = collections.defaultdict(list)
    for run, value in zip(runs, values):
        points[run.period, run.level].append(value)
    return {point: statistics.median(points[point]) for point in sorted(points)}


def print_table(runs, found):
    exchange = by_point(runs, [run.exchange for run in runs])
    measured = by_point(runs, [run.measured for run in runs])
    errors = {
        k: [100 * (x[k] / r.measured - 1) for x, r in zip(found, runs)] for k in KINDS
    }
    points = {kind: by_point(runs, errors[kind]) for kind in KINDS}
    head("H", "Mbit/s", "exchange, s", "measured, %", *KINDS)
    for point, value in measured.items():
        cells = f"{exchange[point]:.2f}", f"{100 * value:.3g}"
        errors_here = (f"{round(points[kind][point]):+d} %" for kind in KINDS)
        row(point[0], f"{point[1] / 1e6:.0f}", *cells, *errors_here)
    for is_longest, name in ((False, "H up to 32"), (True, "H = 128")):
        for kind in KINDS:
            some = [e for e, r in zip(errors[kind], runs) if (r.period > 32) == is_longest]
            least = round(min(some))
            most = round(max(some))
            print(f"{name}, {len(some)} runs, {kind}: {least:+d} to {most:+d} %")


def draw(runs, found, file):
    plt.rcParams |= {"font.size": 9, "svg.hashsalt": "lsgd_jax"}
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    measured = by_point(runs, [run.measured for run in runs])
    styles = {"literature": ":", "plan": "-", "simulator": "--"}
    lines = {kind: by_point(runs, [x[kind] for x in found]) for kind in styles}
    for kind, style in styles.items():
        axes.plot([], [], style, color="black", lw=1.2, label=kind)
    for n, period in enumerate(sorted({run.period for run in runs})):
        points = [point for point in measured if point[0] == period]
        mbit = [level / 1e6 for _, level in points]
        for kind, style in styles.items():
            shares = [100 * lines[kind][point] for point in points]
            axes.plot(mbit, shares, style, color=f"C{n}", lw=1.2)
        shares = [100 * measured[point] for point in points]
        axes.plot(mbit, shares, "o", color=f"C{n}", ms=5, label=f"measured, H = {period}")
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s of each host")
    axes.set_ylabel("share of the time spent computing, %")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main():
    words = parser(__doc__)
    words.add_argument("clone", type=pathlib.Path, help="the clone of diloco-measured")
    words.add_argument("--figure", type=pathlib.Path, help="the file of the figure")
    given = words.parse_args()
    runs = read(given.clone)
    if not runs:
        words.error(f"`clone` must hold {RUNS}, got clone={given.clone}")
    found = predictions(runs)
    print_table(runs, found)
    if given.figure:
        draw(runs, found, given.figure)


if __name__ == "__main__":
    main()
