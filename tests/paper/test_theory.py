"""The statements hold, and their checks can fail."""

import csv
import functools
import re

import jax
import numpy as np
import pytest
from matplotlib import pyplot as plt
from outside import python

from paper import __main__ as paper
from paper import theory
from paper.statements import (
    newton_direction,
    noisy_leader,
    one_step,
    round_robin,
    stationary_points,
)
from paper.statements.claim import Claim, Findings


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield
    plt.close("all")


def all_hold(outcome):
    assert outcome.claims
    return all(claim.holds for claim in outcome.claims)


@pytest.mark.slow  # `test_the_command` makes the check
def test_stationary_points():
    outcome = stationary_points.check(seed=3, landscapes=20)
    assert all_hold(outcome)
    # The gradient at a leader that is not held fixed.
    literal = float(re.findall(r"≥ ([\d.]+)", outcome.remarks[0])[0])
    assert literal > stationary_points.PULL


@pytest.mark.slow
def test_moving_workers_fail_the_check():
    first, balance, elastic, _ = stationary_points.check(landscapes=4, steps=20).claims
    assert not first.holds and not balance.holds and not elastic.holds


@pytest.mark.slow
def test_one_step():
    assert all_hold(one_step.check(seed=3, cases=500))


def test_steps_beyond_the_limits_break_the_inequality():
    assert not all_hold(one_step.check(cases=500, largest=6.0))


def test_one_step_is_the_equation():
    cases = one_step.draw_cases(np.random.default_rng(0), 50)
    quadratic = cases._replace(bend=np.zeros(50))
    c = quadratic
    grad = np.einsum("nij,nj->ni", c.hessian, c.x)
    x = c.x - c.rate[:, None] * (grad + c.pull[:, None] * (c.x - c.z))
    height = lambda x: np.einsum("ni,nij,nj->n", x, c.hessian, x) / 2
    wanted = height(x) + c.rate**2 * height(c.noise)
    lead = height(c.z) < height(c.x)  # without the bend z may be the higher one
    assert lead.sum() > 30
    np.testing.assert_allclose(one_step.step_heights(c)[lead], wanted[lead], rtol=1e-10)


@pytest.mark.slow
def test_without_a_pull_the_variance_is_that_of_sgd():
    """E f = Σ h_k/2 · (ησ)²/d / (1 − (1 − ηh_k)²) in the end, exactly."""
    rate, sigma, groups = 0.05, 2.0, 200
    rows = np.zeros((groups, 1))
    setting = lambda row: noisy_leader.DescentSettings(rate, 0.0, sigma, 5.0)
    heights = noisy_leader.descend(setting, rows, 600, seed=0)[:, 200:].mean(axis=1)
    h = noisy_leader.CURVATURE
    wanted = np.sum(h / 2 * (rate * sigma) ** 2 / len(h) / (1 - (1 - rate * h) ** 2))
    error = heights.std() / np.sqrt(groups)
    assert error < 0.01 * wanted
    assert abs(heights.mean() - wanted) < 4 * error


@pytest.mark.slow  # two other checks fail by default
def test_constant_steps_have_no_rate(monkeypatch):
    constant = lambda row: noisy_leader.DescentSettings(0.05, 0.5, 3.0, row[0])
    monkeypatch.setattr(noisy_leader, "decreasing", constant)
    assert not all_hold(noisy_leader.check_decreasing(groups=10, steps=2000))


@pytest.mark.slow
def test_shares_by_hand():
    """For a small pull the leaders that count fill a half-plane of the circle."""
    share = newton_direction.share_measurer(200, 400)
    h, x = np.array([1.0, 10.0]), newton_direction.place(45.0)
    theta = np.radians(newton_direction.turn_of(x, h))
    assert np.degrees(theta) == pytest.approx(39.29, abs=0.01)
    # Its edge goes through x along −∇f, at this distance from the circle's center.
    grad = h * x
    normal = np.array([-grad[1], grad[0]]) / np.sqrt(h)
    offset = abs(np.array([-grad[1], grad[0]]) @ x) / np.linalg.norm(normal)
    offset /= np.sqrt(x @ (h * x))
    segment = (np.arccos(offset) - offset * np.sqrt(1 - offset**2)) / np.pi
    assert share(x, h, 1e-3) == pytest.approx(1 - segment, abs=1e-3)


def test_a_large_pull_turns_few_steps_to_newtons_direction():
    share = newton_direction.share_measurer(50, 100)
    x, h = newton_direction.place(85.0), np.array([1.0, 10.0])
    assert share(x, h, newton_direction.small_pull(x, h)) > 0.5
    assert share(x, h, 1.0) < 0.4


def test_a_round_by_hand():
    rng = np.random.default_rng(0)
    eta, alpha, x, c = 0.3, 0.2, rng.standard_normal(3), rng.standard_normal()
    whole = round_robin.round_map(np.float64(eta), np.float64(alpha), 3)
    wanted = whole @ np.append(x, c)
    for i in range(3):
        x[i], c = x[i] - eta * x[i] - alpha * (x[i] - c), c + alpha * (x[i] - c)
    np.testing.assert_allclose(wanted, np.append(x, c), rtol=1e-14)


def test_the_command(tmp_path, capsys, monkeypatch):
    for name, sizes in (
        ("stationary-points", {"landscapes": 20, "steps": 2500}),
        ("round-robin", {"grid": 31, "workers": 4}),
    ):
        small = functools.partial(theory.CHECKS[name], **sizes)
        monkeypatch.setitem(theory.CHECKS, name, small)
    arguments = ["theory", "--seed", "1", "--only", "stationary-points", "round-robin"]
    assert paper.main([*arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("holds: ") == 8 and "all claims hold" in printed
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"round-robin.png", "theory.md", "theory.csv"}
    with open(tmp_path / "theory.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["holds"] for row in rows] == ["yes"] * 8
    table = (tmp_path / "theory.md").read_text(encoding="utf-8")
    assert table.count("\n| ") == 9 and "Other observations" in table


def test_a_statement_that_fails_is_status_1(tmp_path, capsys, monkeypatch):
    wrong = Findings([Claim("one is at most zero", "1", 1.0)])
    monkeypatch.setitem(theory.CHECKS, "one-step", lambda seed: wrong)
    assert paper.main(["theory", "--only", "one-step", "--out", str(tmp_path)]) == 1
    assert "FAILS: one is at most zero" in capsys.readouterr().out
    assert "| NO |" in (tmp_path / "theory.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_statement_in_full(tmp_path):
    """In a process of its own, whose programs are optimized, unlike those of tests."""
    command = "-m", "paper", "theory", "--seed", "1", "--out", tmp_path
    python(*command, timeout=600, XLA_FLAGS="").check_returncode()
