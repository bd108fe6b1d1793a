"""The sinc landscape: the published trajectories and shares of random starts."""

import csv
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracles
from paper import __main__ as paper
from paper.sinc import (
    MINIMUM,
    RING,
    STARTS,
    Trajectories,
    descend,
    landscape,
)


ORACLES = pathlib.Path(oracles.__file__).parent


@functools.cache
def paths(method) -> Trajectories:
    with jax.enable_x64(True):
        return descend(method, STARTS[None], 100)


def decided(path):
    """Selects the iterations where rounding does not decide on the leader: the first 85."""
    first, second = np.sort(path.value[0], axis=0)[:2]
    clear = second - first > 1e-15
    assert clear[:85].all()
    return clear


def oracle(name):
    with open(ORACLES / f"sinc_{name}.csv") as file:
        columns = zip(*([float(x) for x in row] for row in list(csv.reader(file))[1:]))
    return [np.array(column) for column in columns]


@pytest.mark.slow
def test_the_landscape_and_its_gradient_at_the_origin():
    value, grad = jax.value_and_grad(landscape)(jnp.zeros(2))
    assert value == 1 and grad.tolist() == [0, 0]
    with jax.enable_x64(True):
        ring = RING * jnp.array([0.6, 0.8])
        assert float(landscape(ring)) == pytest.approx(MINIMUM, abs=1e-6)
        assert np.linalg.norm(jax.grad(landscape)(ring)) < 1e-4


@pytest.mark.parametrize("method", ["LGD", "EASGD"])
def test_every_iteration_agrees_with_the_reference(method):
    """Compares the ten digits of the reference."""
    path, columns = paths(method), oracle(method.lower())
    assert (path.center is None) == (method == "LGD") == (path.leader is not None)
    assert columns[0].tolist() == list(range(1, 101))
    for i in range(4):
        place = np.stack(columns[1 + 2 * i : 3 + 2 * i], axis=-1)
        np.testing.assert_allclose(path.position[0, i], place, rtol=0, atol=1e-8)
        np.testing.assert_allclose(path.value[0, i], columns[9 + i], rtol=0, atol=1e-10)
    if method == "LGD":
        clear = decided(path)
        assert path.leader[0, 0, clear].tolist() == columns[13][clear].tolist()
    else:
        center = np.stack(columns[13:15], axis=-1)
        np.testing.assert_allclose(path.center[0, 0], center, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_instances_are_independent():
    other = -STARTS[::-1]
    with jax.enable_x64(True):
        for method in ("LGD", "EASGD"):
            both = descend(method, np.stack([STARTS, other]), 20)
            np.testing.assert_array_equal(
                both.position[0], paths(method).position[0, :, :20]
            )


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    """40 % and 10 % of the 300 random starts reach the global ring."""
    assert paper.main(["sinc", "--out", str(tmp_path)]) == 0
    assert jnp.ones(1).dtype == jnp.float32  # float64 ends with the experiment
    printed = capsys.readouterr().out
    files = {path.name for path in tmp_path.iterdir()}
    assert files == set(
        "trajectories.png objective.png lgd.csv easgd.csv random-starts.md".split()
    )

    table = (tmp_path / "random-starts.md").read_text(encoding="utf-8")
    assert table in printed
    lgd, easgd = [line.split("|") for line in table.splitlines()[2:]]
    share = lambda row: float(row[4].split("±")[0])
    assert lgd[1:3] == [" LGD ", " 300 "] and abs(share(lgd) - 40) < 5
    assert easgd[1:3] == [" EASGD ", " 300 "] and abs(share(easgd) - 10) < 4

    with open(tmp_path / "lgd.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 100 and float(rows[0]["x1"]) == -15
    assert [int(row["leader"]) for row in rows] == paths("LGD").leader[0, 0].tolist()
    assert float(rows[-1]["L2"]) == paths("LGD").value[0, 2, -1]  # no digit is lost
