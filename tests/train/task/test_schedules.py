"""The learning rate at given steps, counted from 0."""

import numpy as np

from train.config import OptimizerConfig
from train.task.schedules import learning_rate


def at(steps, length=100, **options):
    rate = learning_rate(OptimizerConfig(learning_rate=2.0, **options), length)
    return [float(rate(step)) for step in steps]


def test_a_constant_is_a_number():
    assert learning_rate(OptimizerConfig(learning_rate=2.0), 100) == 2.0


def test_the_rate_drops_after_the_given_steps():
    options = dict(schedule="drops", drop_at=(10, 30), drop_factor=0.5)
    np.testing.assert_allclose(at((0, 9, 10, 29, 30), **options), [2, 2, 1, 1, 0.5])


def test_the_warm_up_is_linear_and_never_zero():
    np.testing.assert_allclose(at((0, 1, 3, 4, 90), warmup_steps=4), [0.5, 1, 2, 2, 2])


def test_the_cosine_ends_at_the_final_fraction():
    seen = at((0, 50, 60, 100, 500), schedule="cosine", final_fraction=0.1)
    between = 0.1 + 0.9 * (1 + np.cos(0.6 * np.pi)) / 2
    expected = [2, 2 * 0.55, 2 * between, 0.2, 0.2]
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


def test_a_warm_up_before_the_cosine():
    options = dict(schedule="cosine", warmup_steps=20)
    seen = at((0, 9, 19, 20, 60, 99), **options)
    np.testing.assert_allclose(seen[:5], [0.1, 1.0, 2.0, 2.0, 1.0], rtol=1e-6)
    assert 0 < seen[-1] < 0.01


def test_the_inverse_square_root_continues_the_warm_up():
    options = dict(schedule="inverse-sqrt", warmup_steps=4)
    expected = [0.5, 2, 2 * (4 / 5) ** 0.5, 1, 0.5]  # the peak is 2
    np.testing.assert_allclose(at((0, 3, 4, 15, 63), **options), expected, rtol=1e-6)
    without = at((0, 3, 99), schedule="inverse-sqrt")
    np.testing.assert_allclose(without, [2, 1, 0.2], rtol=1e-6)
