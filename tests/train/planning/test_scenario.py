"""train.planning.scenario against 48 runs that others measured.

measured_runs.csv has the runs of Adnan082/diloco-measured (Apache-2.0, commit 07b7885):
the period, the bandwidth that was asked for and the one that iperf found, the milliseconds
of a step, and the share of the time spent computing.
"""

import csv
import pathlib
import statistics

from train.planning.candidates import MethodVariant
from train.planning.links import Link
from train.planning.scenario import ALL, Scenario


RUNS = pathlib.Path(__file__).parent / "measured_runs.csv"
PAGE = pathlib.Path(__file__).parents[3] / "docs/results/predictions.md"
WORKERS, PARAMETERS = 4, 30_846_720


def planned(period, mbit, step_ms):
    link = Link.of(mbit, 0.1, WORKERS)
    scenario = Scenario(PARAMETERS, {ALL: link}, step=step_ms / 1e3)
    return 1 - scenario.candidate(MethodVariant("diloco"), (int(period),)).share


def test_utilizations_of_48_runs_of_others():
    """The deviations, and by period and bandwidth the medians that the page prints."""
    errors, points = [], {}
    for row in csv.DictReader(RUNS.read_text().splitlines()):
        period, level, mbit, step_ms, measured = map(float, row.values())
        errors.append(100 * (planned(period, mbit, step_ms) / measured - 1))
        points.setdefault((period, level), []).append(errors[-1])
    assert len(errors) == 48
    assert (round(min(errors)), round(max(errors))) == (-15, 29)
    assert round(statistics.median(map(abs, errors))) == 7
    page = PAGE.read_text()
    for (period, level), each in points.items():
        (line,) = (
            x for x in page.splitlines() if x.startswith(f"| {period:g} | {level:g} |")
        )
        printed = line.split("|")[4]
        assert printed.strip() == f"{round(statistics.median(each)):+d} %"
