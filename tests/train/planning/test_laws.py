"""train.planning.laws against the tables of the papers that the laws are from.

The page of results has ours and theirs.
"""

import pytest
from published import numbers, table

from train.planning import laws


def expected(parameters, replicas, period=30):
    method = "diloco" if replicas else "allreduce"
    return laws.loss(parameters, 20 * parameters, replicas or 4, method, period)


@pytest.mark.parametrize("row", table("Losses"), ids=" ".join)
def test_losses_of_the_paper_are_within_the_stated_error(row):
    """Tables 4 and 6; the first row of the page is data parallel's."""
    replicas = int(row[0][-1]) if row[0].startswith("DiLoCo") else 0
    for parameters, cell, base in zip((4e9, 10e9), row[2:], table("Losses")[0][2:]):
        (printed, theirs), found = numbers(cell), expected(parameters, replicas)
        assert found.nats == pytest.approx(printed, abs=6e-4)
        assert f"± {found.error:.3f}" in cell
        assert abs(theirs - found.nats) <= found.error
        assert abs(theirs - numbers(base)[1] - found.more) <= max(found.more_error, 1e-9)
        joint = laws.JOINT_LOSS(parameters, replicas or 1)
        assert not replicas or abs(theirs - joint) <= laws.ERRORS[-1][2] * joint


@pytest.mark.parametrize("row", table("Differences to data parallel"), ids=" ".join)
def test_differences_hold_in_a_paper_that_the_law_was_not_fitted_to(row):
    size, unit = row[0].split()
    runs = (2, 30), (2, 30), (2, 100), (4, 30), (4, 100)
    for cell, (replicas, period) in zip(row[1:], runs, strict=True):
        printed, theirs = numbers(cell)
        found = expected(float(size) * {"M": 1e6, "B": 1e9}[unit], replicas, period)
        assert found.more == pytest.approx(printed, abs=6e-4)
        assert abs(theirs - found.more) <= found.more_error


# Tables 8 to 11 of arXiv:2503.09799: values of the fits at 1 B parameters, by hand.
@pytest.mark.parametrize(
    "law, replicas, value",
    [
        (laws.LOSS[None], 1, 2.5158),
        (laws.LOSS[1], 1, 2.5064),
        (laws.LOSS[2], 2, 2.5195),
        (laws.LOSS[4], 4, 2.5295),
        (laws.LOSS[8], 8, 2.5531),
        (laws.JOINT_LOSS, 4, 2.5379),
        (laws.RATE, 1, 6.943e-4),
        (laws.JOINT_RATE, 4, 3.800e-4),
        (laws.BATCH, 1, 156_400),
        (laws.JOINT_BATCH, 4, 391_100),
    ],
)
def test_fits(law, replicas, value):
    assert law(1e9, replicas) == pytest.approx(value, rel=1e-3)


def test_the_largest_residuals_of_table_5_are_the_error_up_to_its_size():
    """Residuals of the losses at 2.4 B parameters, of each fit and of the joint one."""
    independent, joint = (0.011, 0.0099, 0.012, 0.014), (0.019, 0.013, 0.0082, 0.0076)
    assert laws.ERRORS[0] == (2.4e9, max(independent), max(joint))


def test_settings():
    assert "outer_rate" not in laws.settings(1e9, 4, "diloco", 100)
    assert set(laws.settings(1e9, 4, "lsgd", 30)) == {"batch"}
    assert set(laws.settings(1e9, 4, "allreduce", 1)) == {"batch", "rate"}
    assert laws.settings(1e9, 8, "diloco", 32)["outer_rate"] == 0.8
    large = [laws.settings(4e11, 4, x, 30)["batch"] for x in ("allreduce", "diloco")]
    assert large[0] == large[1]


@pytest.mark.parametrize(
    "parameters, tokens, replicas, period, reason",
    [
        (1e7, 2e8, 4, 30, "from 35 M to 10 B parameters"),
        (1e11, 2e12, 4, 30, "from 35 M to 10 B parameters"),
        (1e9, 2e10, 16, 30, "for 1 to 8 replicas"),
        (1e9, 1e10, 4, 30, "at 20 tokens per parameter"),
        (1e9, 1e12, 4, 30, "at 20 tokens per parameter"),
        (
            1e9,
            2e10,
            4,
            64,
            "its period is far from those of the laws: 30, and 100 for 2 or 4 replicas",
        ),
        (
            1e9,
            2e10,
            8,
            100,
            "its period is far from those of the laws: 30, and 100 for 2 or 4 replicas",
        ),
    ],
)
def test_no_number_where_no_law_holds(parameters, tokens, replicas, period, reason):
    found = laws.loss(parameters, tokens, replicas, "diloco", period)
    assert (found.nats, found.more) == (None, None) and reason in found.source


def test_with_more_tokens_only_the_difference_is_known():
    found = laws.loss(1e9, 1e11, 3, "diloco", 30)
    assert found.nats is None and found.more == pytest.approx(0.0135, abs=1e-3)
