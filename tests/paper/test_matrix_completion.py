"""Matrix completion: F without cancellation, both methods by hand, the published levels."""

import csv

import jax
import numpy as np
import pytest

from paper import __main__ as paper
from paper import matrix_completion
from paper.factorization import loss_and_grad, problem_of


def exact(x, u):
    """Returns F by its definition, in extended precision."""
    x, u = x.astype(np.longdouble), u.astype(np.longdouble)
    return float(np.square(x @ x.T - u @ u.T).sum() / 4)


def by_library(x, u):
    with jax.enable_x64(True):
        loss, grad = jax.jit(loss_and_grad)(x, problem_of(u))
        return float(loss), np.asarray(grad)


@pytest.mark.parametrize("shape", [(30, 1), (30, 4), (30, 20), (6, 6)])
def test_f_and_its_gradient_agree_with_the_definition(shape):
    rng = np.random.default_rng(0)
    x, u = rng.standard_normal((2, *shape))
    loss, grad = by_library(x, u)
    assert loss == pytest.approx(exact(x, u), rel=1e-12)
    np.testing.assert_allclose(grad, (x @ x.T - u @ u.T) @ x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("distance", [1e-3, 1e-6, 1e-9])
def test_f_keeps_its_digits_near_a_solution(distance):
    rng = np.random.default_rng(1)
    u, e = rng.standard_normal((2, 200, 5))
    turn = np.linalg.qr(rng.standard_normal((5, 5)))[0]
    x = u @ turn + distance * e
    loss, _ = by_library(x, u)
    assert loss == pytest.approx(exact(x, u), rel=1e-11 / distance)


def by_hand(u, x, rate, pull, iterations, lead):
    """Returns F of the best worker of one instance at every iteration, in plain NumPy."""
    center, best = x.mean(axis=0), []
    for _ in range(iterations + 1):
        values = [exact(one, u) for one in x]
        best.append(min(values))
        target = x[int(np.argmin(values))] if lead else center
        center = center + pull * (x - center).sum(axis=0)
        grads = np.stack([(one @ one.T - u @ u.T) @ one for one in x])
        x = x - rate * grads - pull * (x - target)
    return best


def curves_of(**options):
    with jax.enable_x64(True):
        return matrix_completion.curves_of(matrix_completion.CompletionOptions(**options))


@pytest.mark.slow
def test_both_methods_follow_their_equations():
    size = dict(dimension=20, ranks=(1, 3), instances=2, workers=3, iterations=12)
    curves = curves_of(**size, learning_rate=0.02, pull=0.05)
    assert list(curves) == [(1, "LGD"), (1, "EASGD"), (3, "LGD"), (3, "EASGD")]
    for (rank, method), curve in curves.items():
        draw = np.random.default_rng([0, rank]).standard_normal
        us, starts = draw((2, 20, rank)), draw((2, 3, 20, rank))
        for u, x, got in zip(us, starts, curve):
            wanted = by_hand(u, x, 0.02, 0.05, 12, lead=method == "LGD")
            np.testing.assert_allclose(got, wanted, rtol=1e-9)


def check_published(levels):
    """Checks rank -> (iteration, upper bound on F of LGD there, F of EASGD at 49)."""
    curves = curves_of(ranks=tuple(levels), instances=3)
    for rank, (iteration, below, stalls) in levels.items():
        lgd = np.median(curves[rank, "LGD"], axis=0)
        easgd = np.median(curves[rank, "EASGD"], axis=0)
        assert lgd[iteration] < below
        assert easgd[49] == pytest.approx(stalls, rel=0.04)
        drops = lgd[1:][30:] / lgd[:-1][30:]  # linear convergence
        assert (drops < 0.75).all() and drops.std() < 0.05


@pytest.mark.slow
def test_the_published_levels_at_rank_1():
    check_published({1: (30, 1e-7, 0.012)})


@pytest.mark.slow
def test_the_published_levels_at_high_ranks():
    check_published({10: (40, 1e-7, 0.12), 50: (49, 2e-6, 0.59), 100: (49, 1e-2, 1.17)})


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    command = (
        "--dimension 50 --ranks 1 2 --instances 2 --iterations 60 --learning-rate 0.01"
    )
    assert paper.main(["matrix-completion", *command.split(), "--out", str(tmp_path)]) == 0
    assert jax.numpy.ones(1).dtype == np.float32  # float64 ends here
    printed = capsys.readouterr().out
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"curves.png", "curves.csv", "table.md", "table.csv"}
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "table.md").read_text(encoding="utf-8") in printed
    assert "rank 2, EASGD: F = " in printed

    with open(tmp_path / "curves.csv") as file:
        points = list(csv.DictReader(file))
    assert len(points) == 2 * 2 * 2 * 61
    with open(tmp_path / "table.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["method"]) for row in rows] == [
        (rank, method) for rank in "12" for method in ("LGD", "EASGD")
    ]


def test_divergence_is_reported(tmp_path, capsys):
    command = "--dimension 20 --ranks 1 --instances 1 --iterations 9 --learning-rate 10"
    assert paper.main(["matrix-completion", *command.split(), "--out", str(tmp_path)]) == 0
    assert "| 1 | LGD | 1 | inf | inf | inf | – |" in capsys.readouterr().out
