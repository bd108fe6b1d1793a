"""train.planning.bandwidth against the bandwidths of two papers' tables.

The page of results has ours and theirs; it names the papers and the tables.
"""

import pytest
from published import numbers, table

from train.planning.bandwidth import Model, Schedule, needed, points, utilization


SHARES = 0.5, 0.8, 0.9, 0.95, 0.99
SCALING, STREAMING = table("Bandwidths", 0), table("Bandwidths", 1)


@pytest.mark.parametrize("row", [*SCALING, *STREAMING], ids=" ".join)
def test_bandwidths_are_within_one_point_of_the_grid(row):
    parameters, layers, step, *schedule = (float(x.removesuffix(" B")) for x in row[1:8])
    model = Model(1e9 * parameters, int(layers), step)
    planned = Schedule(*map(int, schedule))
    for share, cell in zip(SHARES, row[8:], strict=True):
        printed, theirs = numbers(cell)
        ours = needed(model, planned, share)
        assert ours == pytest.approx(printed, abs=0.0051 if ours < 10 else 0.051)
        assert abs(points(ours, theirs)) <= 1


def test_the_page_counts_what_is_equal():
    def equal(rows):
        pairs = [numbers(cell) for row in rows for cell in row[8:]]
        return len(pairs), sum(points(*pair) == 0 for pair in pairs)

    twice = [row for row in SCALING if row[4] == "1"]
    assert equal([*SCALING, *twice]) == (90, 59)
    assert equal(STREAMING) == (75, 63)


def test_all_but_the_first_layer_hide_behind_the_backward_pass():
    """A pass takes 1 s and a transfer too. The first layer's is waited for."""
    model = Model(1e9 / 8, layers=2, step=5.0)
    assert utilization(model, Schedule(period=1), gbit=1.0) == pytest.approx(5 / 6)
    assert utilization(model, Schedule(period=1, delay=1), gbit=1.0) == 1.0
