"""One coordinator and many mailboxes under load, by workers that do not train."""

import asyncio
import time

import numpy as np
import pytest
import toys

from lsgd_jax._src.asynchronous.engine.coordinator import Coordinator
from lsgd_jax._src.asynchronous.engine.mailbox import Mailbox
from lsgd_jax.asynchronous import Report


STEPS, SIZE = 4, 1000


class Load:
    """Workers that claim steps, meet after each, report, and average with a random peer."""

    def __init__(self, workers):
        self.coordinator = Coordinator(workers, STEPS, period=1)
        self.vectors = np.random.default_rng(0).normal(size=(workers, SIZE))
        self.mailboxes = [Mailbox(index=i) for i in range(workers)]
        self.steps = 0

    async def run(self):
        await asyncio.gather(*map(self.work, range(len(self.mailboxes))))

    async def work(self, i):
        coordinator, mailbox = self.coordinator, self.mailboxes[i]
        everyone, random = range(len(self.mailboxes)), np.random.default_rng(i)
        mailbox.show(lambda: self.vectors[i])
        coordinator.enter(i, 0)
        await coordinator.round(i, "begin", None, everyone)
        step = 1
        while (claim := coordinator.claim(i, step)).go != "stop":
            if claim.go == "join":
                came = await coordinator.round(i, ("join", claim.number), i, everyone)
                assert list(came) == list(everyone)
                continue
            if (j := random.integers(len(everyone))) != i:
                mine = self.vectors[i].copy()
                self.vectors[i] += (self.mailboxes[j].exchange(mine) - mine) / 2
            await asyncio.sleep(0)  # a request of a peer comes in between
            if (moved := mailbox.moved()) is not None:
                self.vectors[i] += moved
            mailbox.show(lambda: self.vectors[i])
            status = coordinator.report(i, Report(steps=step))
            assert len(status.reports) == len(everyone)
            self.steps, step = self.steps + 1, step + 1
        coordinator.finish(i)
        if (moved := mailbox.moved(last=True)) is not None:
            self.vectors[i] += moved


def measured(workers):
    """Steps per second of all workers together."""
    load = Load(workers)
    total, begun = load.vectors.sum(axis=0), time.perf_counter()
    asyncio.run(asyncio.wait_for(load.run(), timeout=120))
    seconds = time.perf_counter() - begun
    assert load.steps == load.coordinator.taken == workers * STEPS
    assert load.coordinator.number == STEPS and load.coordinator.present == []
    np.testing.assert_allclose(load.vectors.sum(axis=0), total, rtol=1e-4, atol=1e-3)
    return load.steps / seconds


@pytest.mark.parametrize("workers", [50, toys.slow(1000)])
def test_every_step_is_granted_once_and_no_move_is_lost(workers):
    measured(workers)


if __name__ == "__main__":
    for workers in (50, 200, 1000):
        print(f"{workers} workers: {measured(workers):.0f} steps per second")
