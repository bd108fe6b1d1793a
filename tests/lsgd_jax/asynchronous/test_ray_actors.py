"""The coordinator's actor, and Ray's errors in one line, without Ray."""

import asyncio

import pytest
from toys import training

import lsgd_jax as lj
from lsgd_jax._src.asynchronous import ray_actors, ray_cluster
from lsgd_jax.asynchronous import Pulls


@pytest.fixture
def coordinator(monkeypatch):
    async def watch(self, i, starts):
        pass

    monkeypatch.setattr(ray_actors.CoordinatorActor, "_watch", watch)
    method = Pulls(lj.local_sgd(2))
    job = ray_actors.Job("job", training, method, 1, 2, 8, lambda i: None, 60, 60, 0)
    return ray_actors.CoordinatorActor(job)


def test_a_round_does_not_wait_for_a_process_that_was_started_again(coordinator):
    """Even if its loss was not noticed before it says hello."""

    async def run():
        for i in range(2):
            await coordinator.hello(i, ("node", i))
            coordinator.enter(i, 0)
        waiting = asyncio.create_task(coordinator.round(0, "key", 1.0, [0, 1]))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await coordinator.hello(1, ("node", 3)) == (2, False)
        return await asyncio.wait_for(waiting, 1)

    assert asyncio.run(run()) == {0: 1.0}


def test_a_worker_that_dies_before_the_start_does_not_make_the_others_lost(coordinator):
    """Its return closes the round 'begin', and the worker that waits there goes on."""

    async def run():
        for i in range(2):
            await coordinator.hello(i, ("node", i))
        members, begun = coordinator.enter(0, 0)
        waiting = asyncio.create_task(coordinator.round(0, "begin", 0, members))
        await asyncio.sleep(0)
        assert not begun and not waiting.done()
        assert await coordinator.hello(1, ("node", 3)) == (2, False)
        assert await asyncio.wait_for(waiting, 1) == {0: 0}
        assert coordinator.enter(1, 0)[1]

    asyncio.run(run())


def test_steps_that_are_taken_again_are_no_progress(coordinator):
    """A worker that keeps restoring an older checkpoint is given up."""

    async def run():
        for start in range(4):
            await coordinator.hello(0, ("node", start))
            coordinator.report(0, lj.asynchronous.Report(steps=5 + (start == 0)))
        return (await coordinator.overview()).vain[0]

    assert asyncio.run(run()) == 3


@pytest.mark.parametrize(
    "address, error, line",
    [
        (None, Exception("timed out after 60 s"), "Ray did not start on this machine"),
        ("auto", ConnectionError("none"), "no Ray cluster answers at auto"),
        ("h:1", RuntimeError("InvalidAuthToken"), "set RAY_AUTH_MODE=token"),
    ],
)
def test_errors_of_ray_are_one_line_with_what_to_try(address, error, line):
    advice = ray_cluster.advice(address, error)
    assert line in advice and "\n" not in advice and str(error) in advice
