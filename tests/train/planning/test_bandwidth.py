"""train.planning.bandwidth against the bandwidths of two papers' tables.

published_bandwidths.csv has Table 7 of arXiv:2503.09799 and Table 4 of arXiv:2501.18512.
The first paper gives 26 and 26.9 s for a step of Llama 3, 20 and 20.1 s for DeepSeek-V3.
"""

import csv
import pathlib

import pytest
from published import numbers, table

from train.planning.bandwidth import Model, SendSchedule, needed, points, utilization


PUBLISHED = pathlib.Path(__file__).parent / "published_bandwidths.csv"
ROWS = {row["setting"]: row for row in csv.DictReader(PUBLISHED.read_text().splitlines())}
SHARES = "0.5", "0.8", "0.9", "0.95", "0.99"


def ours(row, share):
    model = Model(1e9 * float(row["parameters"]), int(row["layers"]), float(row["step"]))
    schedule = SendSchedule(
        *(int(row[x]) for x in ("period", "fragments", "delay", "bits"))
    )
    return needed(model, schedule, float(share))


def off(row):
    """The distances between ours and theirs, in points of the grid."""
    return [points(ours(row, share), float(row[share])) for share in SHARES]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ROWS)
def test_bandwidths_are_within_one_point_of_the_grid(setting):
    assert max(map(abs, off(ROWS[setting]))) <= 1


def test_the_page_counts_what_is_equal():
    counts = {"2503.09799": [], "2501.18512": []}
    for row in ROWS.values():
        twice = row["paper"] == "2503.09799" and row["period"] == "1"  # two lines there
        counts[row["paper"]] += off(row) * (2 if twice else 1)
    equal = [(len(each), each.count(0)) for each in counts.values()]
    assert equal == [(90, 59), (75, 63)]


@pytest.mark.parametrize("cells", table("Bandwidths"), ids=lambda cells: cells[0])
def test_the_page_prints_both(cells):
    row = ROWS[cells[0]]
    for share, cell in zip(("0.5", "0.8", "0.9", "0.99"), cells[1:], strict=True):
        printed, theirs = numbers(cell)
        found = ours(row, share)
        assert found == pytest.approx(printed, abs=0.0051 if found < 10 else 0.051)
        assert theirs == float(row[share])


def test_all_but_the_first_layer_hide_behind_the_backward_pass():
    """A pass takes 1 s and a transfer too. The first layer's is waited for."""
    model = Model(1e9 / 8, layers=2, step=5.0)
    assert utilization(model, SendSchedule(period=1), gbit=1.0) == pytest.approx(5 / 6)
    assert utilization(model, SendSchedule(period=1, delay=1), gbit=1.0) == 1.0
