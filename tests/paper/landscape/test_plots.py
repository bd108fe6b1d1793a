"""Figures of landscapes with unusual values."""

import io

import numpy as np
import pytest
from landscapes import landscape_of
from toys import slow

from paper.landscape import plots
from paper.landscape.compute import Mark


@pytest.mark.parametrize(
    "values, path",
    [
        slow(np.full((3, 3), np.nan), []),
        slow(np.full((3, 3), np.inf), [[0, 0, 0]] * 3),
        slow(np.zeros((3, 3)), [[np.nan] * 3] * 2),
        slow(np.full((3, 3), 2.5), [[1e20, 1, 1e20], [0, 0, 0]]),
        (
            np.array([[1, np.inf, 3], [1e25, 5, np.nan], [0, 1e-30, 9]]),
            [[1, 1, 2], [np.nan] * 3, [0, 0, 0]],
        ),
    ],
    ids=["nan", "inf", "zero", "flat", "cliffs"],
)
def test_unusual_values_and_trajectories_are_drawn(values, path):
    marks = [Mark("a", np.zeros(3), 1.0), Mark("b", np.array([1, 1, 4.0]), np.nan)]
    file = io.BytesIO()
    plots.draw(landscape_of(values, path, marks), file, "author")
    assert file.getvalue()[:4] == b"\x89PNG" and b"author" in file.getvalue()


def test_levels_rise_and_cover_all_values():
    for values in (np.array([0.0, 1e-7, 3.0]), np.array([2.3, 2.31]), np.array([-4.0])):
        for logarithmic in (True, False):
            levels = plots.levels_of(values, logarithmic)
            assert (np.diff(levels) > 0).all()
            assert levels[0] <= values.min() and levels[-1] >= values.max() * (1 - 1e-12)
