"""The best worker does not depend on when losses are read."""

import numpy as np

from train.metrics.recent import SPAN, RecentLosses


def test_averages_do_not_depend_on_when_losses_are_read():
    losses = np.random.default_rng(0).normal(2, 1, (50, 4)).astype(np.float32)
    losses[20, 1] = np.nan
    at_once, one_by_one = RecentLosses.unknown(4), RecentLosses.unknown(4)
    at_once.add(losses[:30])
    resumed = RecentLosses(at_once.average, at_once.nonfinite_steps)
    resumed.add(losses[30:])
    for loss in losses:
        one_by_one.add([loss])
    np.testing.assert_array_equal(resumed.average, one_by_one.average)


def test_the_average_is_exponential_and_restarts_after_a_nonfinite_loss():
    recent = RecentLosses.unknown(2)
    recent.add(np.array([[1.0, 2.0]]))
    assert recent.best == 0 and recent.average.tolist() == [1, 2]
    recent.add(np.array([[17.0, 2.0]]))
    assert recent.average.tolist() == [1 + 16 / SPAN, 2]
    recent.add(np.array([[np.nan, 2.0]]))
    assert recent.average.tolist() == [np.inf, 2] and recent.best == 1
    recent.add(np.array([[0.5, np.inf]]))
    assert recent.average.tolist() == [0.5, np.inf] and recent.best == 0


def test_consecutive_steps_without_a_finite_loss_are_counted():
    recent = RecentLosses.unknown(2)
    recent.add(np.array([[np.nan, np.inf], [np.nan, np.nan]]))
    assert recent.nonfinite_steps == 2
    recent.add(np.array([[np.nan, 1.0]]))
    assert recent.nonfinite_steps == 0
