"""Every worker's order: whole epochs, its own, and a function of the step alone."""

import numpy as np
import pytest

from train.data.sampler import EpochSampler


def test_an_epoch_shows_every_image_once_to_every_worker():
    sampler = EpochSampler(size=12, batch_size=4, seed=0)
    epoch = np.concatenate([sampler.rows(step, range(3)) for step in range(3)], axis=1)
    assert all(sorted(row) == list(range(12)) for row in epoch.tolist())
    following = np.concatenate(
        [sampler.rows(step, range(3)) for step in range(3, 6)], axis=1
    )
    orders = {tuple(row) for row in [*epoch.tolist(), *following.tolist()]}
    assert len(orders) == 6  # another order for every worker and epoch


def test_rows_depend_on_seed_worker_and_step_alone():
    """Not on what was asked before, nor on which process asks."""
    whole = EpochSampler(100, 8, seed=1).rows(25, range(4))
    np.testing.assert_array_equal(
        EpochSampler(100, 8, seed=1).rows(25, range(2, 4)), whole[2:]
    )
    assert not np.array_equal(EpochSampler(100, 8, seed=2).rows(25, range(4)), whole)
    assert whole.dtype == np.int32


def test_what_does_not_fill_a_batch_is_left_out():
    assert EpochSampler(size=10, batch_size=4, seed=0).steps_per_epoch == 2
    with pytest.raises(
        ValueError, match="`batch_size` must be at most 3, .* got batch_size=4"
    ):
        EpochSampler(size=3, batch_size=4, seed=0)
