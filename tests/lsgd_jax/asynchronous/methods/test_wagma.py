"""Asynchronous WAGMA: groups averaged by the first to arrive, and the mean of all."""

import jax.numpy as jnp
import numpy as np
import pytest
import toys

from lsgd_jax.asynchronous import WAGMA


NEVER = 1000


def after(steps, method, workers, seconds):
    """Positions of all after some own steps that add 8 each, from 0, 1, 2, …."""
    note, seen = toys.noting(toys.position)
    up = lambda x, s, i, t: ({k: jnp.full_like(v, 8.0) for k, v in x.items()}, s, i, 1.0)
    task = toys.resting()._replace(step=up)
    toys.simulate(task, method, 1, workers, 6, seconds, observe=note)
    return [seen[i][steps - 1] for i in range(workers)]


def test_the_first_member_makes_the_mean_and_a_late_one_adds_its_parameters(monkeypatch):
    """By hand: workers start at their index, a step adds 8, and worker 0 comes first."""
    monkeypatch.setattr("zlib.crc32", lambda data: 0)  # so that they may start apart
    first, late = after(1, WAGMA(2, NEVER), 2, [1, 1.5])
    assert first == (8 + 1) / 2  # worker 1 contributes where it has started
    assert late == (8 + 1 + 9) / 3  # the same sum, and its own
    seconds = [1, 1.1, 1.2, 1.3]
    one = after(1, WAGMA(2, NEVER), 4, seconds)
    assert one[0] == (8 + 1) / 2 and one[2] == (10 + 3) / 2  # pairs (0, 1) and (2, 3)
    assert after(2, WAGMA(2, NEVER), 4, seconds)[0] == (one[0] + 8 + one[2]) / 2  # (0, 2)
    assert after(1, WAGMA(4, NEVER), 4, seconds)[0] == (8 + 1 + 2 + 3) / 4


def test_the_mean_of_all_makes_workers_equal_and_bounds_staleness():
    note, stale = toys.noting(lambda worker: worker.report.staleness)
    method, seconds = WAGMA(2, sync_period=5), [1, 1.01, 1.02, 3]
    found = toys.simulate(toys.training(), method, 2, 2, 10, seconds, observe=note)
    assert sum(worker.count for worker in found) == 40
    assert found[0].count > 2 * found[3].count
    assert [worker.method.state()["rounds"] for worker in found] == [2] * 4
    # It ends with the second mean of all.
    assert np.ptp(toys.stacked(found), axis=0).max() == 0
    assert (
        2 <= max(max(each) for each in stale.values()) <= 4 * 5
    )  # all steps between two means


def test_the_mean_of_all_waits_for_a_slow_worker_until_the_timeout():
    found = toys.simulate(
        toys.training(), WAGMA(2, sync_period=4), 1, 2, 40, [1, 20], timeout=3
    )
    assert found[0].report.longest == pytest.approx(3, abs=0.01)
    assert sum(worker.count for worker in found) == 80 and found[1].count > 1


@pytest.mark.slow  # `test_contents.py` has small steps of the other methods
@pytest.mark.parametrize(
    "format, seconds", [("int4", [1, 5, 1, 5]), ("int8", [1, 1.01, 1.02, 3])]
)
def test_small_steps_are_not_lost_to_rounding_at_unequal_speeds(format, seconds):
    """One parameter moves 64 times as fast as all others of its block."""
    slow = 1 / 16 / {"int8": 127, "int4": 7}[format]
    by = jnp.full([256], -slow).at[0].set(-64 * slow)
    task = toys.moving(jnp.ones([256]), lambda x, i: by)

    def fallen(wire):
        method = WAGMA(2, sync_period=8, wire=wire)
        return 1 - toys.stacked(toys.simulate(task, method, 1, 4, 128, seconds)).mean(0)

    exact, rounded = fallen("float32"), fallen(format)
    np.testing.assert_allclose(rounded[0], exact[0], rtol=0.01)
    assert (rounded[1:] > 0.5 * exact[1:]).all()


def test_the_number_of_workers_must_be_a_power_of_two():
    with pytest.raises(ValueError, match="a power of two workers .*, got 3"):
        toys.simulate(toys.training(), WAGMA(2, 4), 1, 3, 5)
