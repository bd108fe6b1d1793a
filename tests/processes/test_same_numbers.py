"""The same numbers however the workers lie over processes, and resuming across these."""

import shutil

import numpy as np
import pytest
import tiny
from processes import same_numbers
from processes.test_processes import run

import lsgd_jax as lj
from train.run.open import open_run


@pytest.fixture(scope="module")
def single():
    """The parameters after every method in this process, on its 8 devices."""
    return {method: same_numbers.train(method) for method in same_numbers.METHODS}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_of_any_number_give_the_same_parameters(count, single, tmp_path):
    answers, _ = run("methods", tmp_path, count, script="same_numbers.py")
    assert all(answer == answers[0] for answer in answers)
    for method, params in single.items():
        written = np.load(tmp_path / f"{method}.npz")
        for name, expected in params.items():
            got = written[name]
            assert np.ptp(expected, axis=0).max() > 1e-3  # eight workers, not one
            if method == "easgd":  # sums run in another order
                np.testing.assert_allclose(got, expected, rtol=1e-6, atol=5e-7)
            else:
                np.testing.assert_array_equal(got, expected, err_msg=f"{method} {name}")
    # Workers sharded over devices of several processes, against whole ones in this one.
    whole = same_numbers.train("lsgd", lj.Workers(1, 2))
    written = np.load(tmp_path / "spread.npz")
    for name, expected in whole.items():
        np.testing.assert_allclose(written[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_in_other_processes_with_the_same_and_with_other_workers(
    tmp_path, monkeypatch
):
    """Written by two processes, gone on with by them with more workers, then by one."""
    tiny.install(set=monkeypatch.setattr)
    answers, _ = run("write_and_grow", tmp_path, 2, script="same_numbers.py")
    first, second = answers
    assert first["same"] and second["same"] and first["step"] == second["step"] == 6
    assert first["sources"] == second["sources"] and len(first["sources"]) == 8
    assert first["owned"] == [0, 1, 2, 3] and second["owned"] == [4, 5, 6, 7]
    folder = tmp_path / "run"
    after = np.load(tmp_path / "after.npz")
    again = open_run(same_numbers.configured(folder, 2, 4, steps=6, resume=True))
    assert again.step == 6 and again.resizing is None
    for name, x in same_numbers.numbers_of(again).items():
        np.testing.assert_array_equal(x, after[name])

    # The checkpoint before: of the four workers of the beginning.
    shutil.rmtree(folder / "checkpoints" / "6")
    before = np.load(tmp_path / "before.npz")
    same = open_run(same_numbers.configured(folder, 2, 2, steps=6, resume=True))
    for name, x in same_numbers.numbers_of(same).items():
        np.testing.assert_array_equal(x, before[name])
    fewer = open_run(same_numbers.configured(folder, 1, 2, steps=6, resume=True))
    for name, x in same_numbers.numbers_of(fewer).items():
        np.testing.assert_array_equal(x, before[name][fewer.resizing.sources])
    assert len(fewer.resizing.sources) == 2
