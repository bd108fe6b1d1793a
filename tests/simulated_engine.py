"""Asynchronous workers under simulated time, in place of Ray: an engine for the trainer."""

import asyncio
import functools
from types import SimpleNamespace

import tiny

from lsgd_jax._src.asynchronous.engine.worker import work
from lsgd_jax._src.asynchronous.simulated.clock import run_virtual
from lsgd_jax._src.asynchronous.simulated.simulator import Simulation
from lsgd_jax._src.asynchronous.simulated.speeds import Speeds
from train.run import asynchronous as running
from train.task import asynchronous


training_of = functools.cache(asynchronous.training)


class Stopped(Exception):
    """Ends a worker at the boundary of this step."""


class Remote:
    """The workers as the trainer sees them; `lose` is a failure that befalls one."""

    def __init__(self, simulation, workers):
        self._simulation, self._workers = simulation, workers
        self.stopped, self.ended = False, {}

    def states(self, own=True):
        down = self._simulation.down
        return [None if w.index in down else w.state(own) for w in self._workers]

    def stop(self):
        self.stopped = True

    def lose(self, i):
        self._simulation.drop(i)
        self._simulation.coordinator.leave(i)


def install(set, step_seconds=1.0, look=4, befalls=lambda status, remote: None):
    """Has the trainer of this process use it.

    look: after how many steps of all workers the trainer is told of them.
    befalls: (status, remote), called before the trainer is.
    """

    async def conduct(training, method, grid, steps, timeout, states, on_status):
        nodes, locals = grid
        given = [step_seconds] * nodes * locals
        seconds = given if isinstance(step_seconds, float) else step_seconds
        speeds = Speeds(1.0, slow=dict(enumerate(seconds)))
        simulation = Simulation(method, *grid, steps, speeds=speeds, timeout=timeout)
        coordinator = simulation.coordinator
        workers = [simulation.enter(training, i) for i in range(nodes * locals)]
        for worker, state in zip(workers, states or []):
            worker.take_over(state)
        remote, seen = Remote(simulation, workers), []

        def told(status):
            befalls(status, remote)
            on_status(status, remote)

        def observe(worker):
            status = coordinator.report(worker.index, worker.report)
            seen.append(worker.index)
            if len(seen) % look == 0:
                told(status)
            if remote.stopped:
                raise Stopped

        tasks = [w.transport.start(work(w, observe)) for w in workers]
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(end, Exception) and not isinstance(end, Stopped):
                raise end
        for worker in workers:
            if worker.index not in simulation.down:
                await worker.tell()
                coordinator.report(worker.index, worker.report)
        status = coordinator.status()
        told(status)
        return SimpleNamespace(
            states=remote.states(), status=status, stopped=remote.stopped
        )

    def run(
        make_training, method, nodes, locals, steps, *, options, states, restore, on_status
    ):
        del restore
        training = training_of(tiny.of_all_runs(*make_training.args))
        grid, timeout = (nodes, locals), options.timeout
        return run_virtual(
            conduct(training, method, grid, steps, timeout, states, on_status)
        )

    engine = SimpleNamespace(run=run, ClusterOptions=SimpleNamespace)
    set(running, "engine", lambda: engine)
