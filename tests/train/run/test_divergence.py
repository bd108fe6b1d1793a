"""The step at which a run stops if no worker is finite any more."""

import itertools

import numpy as np
import pytest

from train.metrics.recent import RecentLosses
from train.run.divergence import Divergence


class Losses:
    """Stands for a `MetricsBuffer`: losses of two workers, nan at the steps `bad`.

    Steps in `skipped` have no losses.
    """

    def __init__(self, bad, recent=None, read=0, skipped=()):
        self.recent, self.read, self._bad = recent or RecentLosses.unknown(2), read, bad
        self.taken = read
        self._skipped = skipped

    def read_losses(self, until):
        assert until <= self.taken
        for step in range(self.read + 1, until + 1):
            loss = np.nan if step in self._bad else 1.0
            if step not in self._skipped:
                self.recent.add([np.array([loss, np.nan])])
            self.read = step


def stops_after(losses, limit, steps=60):
    divergence = Divergence(limit, losses)
    for step in range(losses.read + 1, steps):
        losses.taken = step
        if divergence.stops_at(step):
            return step
    return None


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
def test_a_run_stops_exactly_at_the_limit(limit):
    for first in range(1, 30):
        bad = range(first, 60)
        assert stops_after(Losses(bad), limit) == first + limit - 1
        late = [first - 1 - limit // 2, *bad] if limit > 1 else bad
        assert stops_after(Losses(late), limit) == first + limit - 1


def test_nonfinite_steps_must_be_consecutive():
    every_other = set(range(1, 60)) - set(range(10, 60, 10))
    assert stops_after(Losses(every_other), 10) is None
    assert stops_after(Losses(every_other), 9) == 9


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
def test_steps_without_a_gradient_do_not_count(limit):
    for seed in range(30):
        skipped = set(np.flatnonzero(np.random.default_rng(seed).random(200) < 0.5))
        first = 5 + seed
        bad = [step for step in range(first, 200) if step not in skipped]
        losses = Losses(range(first, 200), skipped=skipped)
        assert stops_after(losses, limit, steps=200) == bad[limit - 1]


def test_losses_are_read_after_their_steps_are_complete():
    losses, reads = Losses([]), []
    divergence = Divergence(20, losses)
    for step in range(1, 60):
        losses.taken = step
        divergence.stops_at(step)
        reads.append(losses.read)
    assert [len(list(same)) for _, same in itertools.groupby(reads)] == [19, 10, 10, 10, 10]
    assert all(step - read >= 10 for step, read in enumerate(reads, start=1) if read)


def test_a_resumed_run_keeps_its_count():
    recent = RecentLosses(np.full(2, np.inf), nonfinite_steps=4)
    assert stops_after(Losses(range(1, 60), recent, read=10), limit=6) == 12
