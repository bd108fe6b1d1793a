"""Workers at their own pace in one thread, in place of Ray: an engine for the trainer."""

import functools
from types import SimpleNamespace

import tiny

from lsgd_jax._src.asynchronous.memory import Memory
from lsgd_jax._src.asynchronous.worker import Worker, work
from train.run import asynchronous as running
from train.task import asynchronous


training_of = functools.cache(asynchronous.training)


class Stopped(Exception):
    """The run is to end at the boundary of this step."""


class Remote:
    """The workers as whoever follows them sees them; `lose` is what befalls them."""

    def __init__(self, memory, workers):
        self._memory, self._workers = memory, workers
        self.stopped, self.ended = False, {}

    def states(self, own=True):
        lost = self._memory.lost
        number = self._memory.coordinator.number
        state = lambda w: {**w.state(own), "number": number}
        return [None if w.index in lost else state(w) for w in self._workers]

    def stop(self):
        self.stopped = True

    def lose(self, i):
        self._memory.lose(i)
        self._memory.coordinator.leave(i)


def install(set, step_seconds=1.0, look=4, befalls=lambda standing, remote: None):
    """Has the trainer of this process use it.

    look: after how many steps of all workers the trainer is told of them.
    befalls: (standing, remote), called before the trainer is.
    """

    def run(
        make_training,
        method,
        nodes,
        locals,
        steps,
        *,
        options,
        states,
        restore,
        on_standing,
    ):
        del restore
        memory = Memory(
            nodes,
            locals,
            steps,
            method.period,
            step_seconds=step_seconds,
            grace=options.grace,
        )
        training = training_of(tiny.of_all_runs(*make_training.args))
        workers = [Worker(training, method, ports, steps) for ports in memory.ports]
        for worker, state in zip(workers, states or []):
            worker.take_over(state)
            memory.coordinator.number = max(memory.coordinator.number, state["number"])
        remote, seen = Remote(memory, workers), []

        def told(standing):
            befalls(standing, remote)
            on_standing(standing, remote)

        def observe(worker):
            standing = memory.coordinator.report(worker.index, worker.report)
            seen.append(worker.index)
            if len(seen) % look == 0:
                told(standing)
            if remote.stopped:
                raise Stopped

        tasks = [memory.start(work(w, observe), w.index) for w in workers]
        memory.run()
        for task in tasks:
            if task.error is not None and not isinstance(task.error, Stopped):
                raise task.error
        standing = memory.coordinator.standing()
        told(standing)
        states = remote.states()
        return SimpleNamespace(states=states, standing=standing, stopped=remote.stopped)

    engine = SimpleNamespace(run=run, Options=SimpleNamespace)
    set(running, "engine", lambda: engine)
